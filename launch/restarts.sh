#!/usr/bin/env bash
# Runs a command, and again after a failure, at most N times more.
# Usage: launch/restarts.sh N command...
# A training run resumes from its newest checkpoint. These exit statuses are final: 0, the
# run is complete; 2, a knob or a file is wrong; 3, the run diverged and would again.
# SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on, the last two as SIGTERM, and end the
# restarts. $RESTART_AFTER (20) is the pause in seconds before a restart, so that the
# processes of other hosts, which need up to 15 s, have ended too. Needs bash 5.1.
# Source this file to use the function `restarts N command...`.

restarts() {
  local most=$1 count=0 status child
  shift
  stopping=0
  set -m # the command gets a process group of its own, and a SIGINT is not ignored in it
  while true; do
    "$@" &
    child=$!
    trap 'stopping=1; kill -INT "$child" 2> /dev/null' INT
    trap 'stopping=1; kill -TERM "$child" 2> /dev/null' TERM HUP USR1
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
  trap - INT TERM HUP USR1
  set +m
  return "$status"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    # shellcheck source=launch/common.sh
    source "$(dirname "$0")/common.sh"
    usage
    exit
  fi
  if [[ $# -lt 2 || ! $1 =~ ^[0-9]+$ ]]; then
    echo 'Usage: launch/restarts.sh N command... (--help explains)' >&2
    exit 2
  fi
  restarts "$@"
fi
