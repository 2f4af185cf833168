#!/usr/bin/env bash
# Runs a command; where it fails, runs it again. A run goes on from its newest checkpoint.
# Usage: launch/restarts.sh N command..., with at most N restarts. It needs bash 5.1.
# Three statuses are final: 0 (done), 2 (a wrong knob or file, which stays wrong) and 3
# (the run diverged, and would again). SIGINT, SIGTERM and SIGHUP are passed on, and
# nothing is run again after them. RESTART_AFTER (20) is the pause before a restart in
# seconds: by then the other hosts have ended as well, which takes them up to 15.
# Source it for `restarts N command...` as a function.

restarts() {
  local most=$1 count=0 status child
  shift
  stopping=0
  set -m # the command gets a process group of its own, and a SIGINT is not ignored in it
  while true; do
    "$@" &
    child=$!
    trap 'stopping=1; kill -INT "$child" 2> /dev/null' INT
    trap 'stopping=1; kill -TERM "$child" 2> /dev/null' TERM HUP
    while kill -0 "$child" 2> /dev/null; do # a signal ends a wait early
      wait "$child" 2> /dev/null
    done
    wait "$child" 2> /dev/null
    status=$?
    case $status in 0 | 2 | 3) break ;; esac
    if ((stopping || count >= most)); then break; fi
    count=$((count + 1))
    sleep "${RESTART_AFTER:-20}" &
    child=$! # which a signal ends early
    echo "launch: status $status; restart $count of $most" >&2
    ((stopping)) || wait "$child" 2> /dev/null
    if ((stopping)); then break; fi
  done
  trap - INT TERM HUP
  set +m
  return "$status"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  if [[ $# -lt 2 || ! $1 =~ ^[0-9]+$ ]]; then
    echo 'Usage: launch/restarts.sh N command...' >&2
    exit 2
  fi
  restarts "$@"
fi
