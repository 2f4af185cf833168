#!/usr/bin/env bash
# Runs one training run in N processes of this machine, as if on N hosts.
# Usage: launch/processes.sh N [options] [flags of bapo_jax.main]
#   --devices=8    devices of all processes together, N or a multiple of N. By default
#                  they are virtual devices of the CPU; with JAX_PLATFORMS=cuda they are
#                  the first GPUs of this machine. A TPU host runs a single process.
#   --restarts=3   largest number of restarts, see launch/restarts.sh --help
#   --grace=20     seconds after the first failure until the other processes are killed
#   --dry-run      prints the commands without running them
# Example, two processes with four virtual devices each:
#   launch/processes.sh 2 --devices=8 --config=configs/aime.py --workdir=runs/two
# Each line of output begins with the number of its process. If a process fails, all end,
# with its exit status. Ctrl-C and SIGTERM are passed on.
# Python is .venv/bin/python of the repository, or $PYTHON. Needs bash 5.1.
set -u
cd "$(dirname "$0")/.." || exit 2
# shellcheck source=launch/common.sh
source launch/common.sh

fail() {
  echo "launch/processes.sh: $1" >&2
  exit 2
}

parse() { # the options; what is left are flags of main
  n=${1:-} devices='' most=3 grace=20 dry=0 once=0 flags=()
  [[ $n =~ ^[1-9][0-9]*$ ]] || fail 'give the number of processes first; --help explains'
  for arg in "${@:2}"; do
    case $arg in
      --devices=*) devices=${arg#*=} ;;
      --restarts=*) most=${arg#*=} ;;
      --grace=*) grace=${arg#*=} ;;
      --dry-run) dry=1 ;;
      --once) once=1 ;; # one attempt, of launch/restarts.sh
      *) flags+=("$arg") ;;
    esac
  done
  devices=${devices:-$n}
  [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices=$devices is not a number of devices"
  [[ $most$grace =~ ^[0-9]+$ ]] || fail '--restarts and --grace are whole numbers'
  ((devices % n == 0)) || fail "$devices devices do not divide over $n processes"
  platform=${JAX_PLATFORMS:-cpu}
  [[ $platform == cpu || $platform == cuda ]] ||
    fail "JAX_PLATFORMS=$platform: only cpu and cuda devices are divided"
}

free_port() { # below the ports that outgoing connections take
  local port
  while true; do
    port=$((20000 + RANDOM % 10000))
    (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || break
  done
  echo "$port"
}

command_of() { # fills `line` with the command of process $1, its environment first
  local each=$((devices / n)) first list
  line=(env "JAX_PLATFORMS=$platform")
  if [[ $platform == cpu ]]; then
    list="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$each"
    line+=("XLA_FLAGS=${list# }")
  else
    line[1]+=,cpu # where weights are loaded
    first=$(($1 * each))
    list=$(seq -s, "$first" $((first + each - 1)))
    line+=("CUDA_VISIBLE_DEVICES=$list")
  fi
  line+=("${PYTHON:-.venv/bin/python}" -u -m "${MAIN:-bapo_jax.main}")
  line+=(${flags[@]+"${flags[@]}"} "--coordinator=127.0.0.1:$port")
  line+=("--process=$1" "--processes=$n")
}

numbered() { # each line of the input with a number in front; signals end the writer only
  trap '' INT TERM HUP USR1
  while IFS= read -r text || [[ -n $text ]]; do printf '[%s] %s\n' "$1" "$text"; done
}

start() { # all processes, each in a group of its own
  local i out
  pids=() writers=()
  for ((i = 0; i < n; i++)); do
    exec {out}> >(numbered "$i")
    writers+=($!)
    command_of "$i"
    "${line[@]}" < /dev/null >&"$out" 2>&1 &
    pids+=($!)
    exec {out}>&-
  done
}

pass_on() {
  stopping=1
  kill "-$1" "${pids[@]}" 2> /dev/null
}

attempt() { # runs all to their end; the status of the first that failed, else 0
  local status=0 left deadline=0 pid found i
  stopping=0
  set -m
  start
  trap 'pass_on INT' INT
  trap 'pass_on TERM' TERM HUP USR1
  left=("${pids[@]}")
  while ((${#left[@]})); do
    for pid in "${!left[@]}"; do
      kill -0 "${left[pid]}" 2> /dev/null && continue
      wait "${left[pid]}" 2> /dev/null
      found=$?
      unset "left[pid]"
      if ((found && !status)); then
        status=$found deadline=$((SECONDS + grace))
      fi
    done
    # Asked to stop, they save first, however long that takes.
    if ((deadline && !stopping && SECONDS >= deadline)); then
      for pid in "${left[@]}"; do kill -KILL -- "-$pid" 2> /dev/null; done
    fi
    sleep 0.2 &
    wait $! 2> /dev/null
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2> /dev/null; done # their children
  for ((i = 0; i < 20; i++)); do # a child in a group of its own may hold them open
    kill -0 "${writers[@]}" 2> /dev/null || break
    sleep 0.1
  done
  return "$status"
}

case ${1:-} in -h | --help) usage && exit ;; esac
parse "$@"
((dry)) || need_python "${PYTHON:-.venv/bin/python}"
if ((dry)); then
  port=$(free_port)
  for ((i = 0; i < n; i++)); do
    command_of "$i"
    printf '%q ' "${line[@]}"
    echo '&'
  done
elif ((once)); then
  port=$(free_port)
  attempt
else
  RESTART_AFTER=0 exec launch/restarts.sh "$most" launch/processes.sh "$@" --once
fi
