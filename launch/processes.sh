#!/usr/bin/env bash
# Several processes of one run on this machine, as on so many hosts.
# Usage: launch/processes.sh N [options] [flags of bapo_jax.main], from the top of the
# repository, after the README's first command made .venv. It needs bash 5.1.
#   --devices=8    devices in all, N or a multiple of it; each process gets as many. On a
#                  CPU (where JAX_PLATFORMS is not set) they are virtual. With
#                  JAX_PLATFORMS=cuda they are the first of this machine's GPUs. The
#                  chips of a TPU are not divided: there one process has the whole host.
#   --restarts=3   at most so many restarts, from the newest checkpoint; the rule stands
#                  in launch/restarts.sh
#   --grace=20     seconds that the others may live after the first failure
#   --dry-run      prints the commands and runs none
# Each line of the output begins with the number of its process. The first process that
# fails ends all, and its status is that of the whole. Ctrl-C and SIGTERM are passed on.
set -u
cd "$(dirname "$0")/.." || exit 2

fail() {
  echo "launch/processes.sh: $1" >&2
  exit 2
}

parse() { # the options; what is left are flags of main
  n=${1:-} devices='' most=3 grace=20 dry=0 once=0 flags=()
  [[ $n =~ ^[1-9][0-9]*$ ]] || fail 'give the number of processes first'
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
  [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices=$devices is no number of devices"
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
    first=$(($1 * each))
    list=$(seq -s, "$first" $((first + each - 1)))
    line+=("CUDA_VISIBLE_DEVICES=$list")
  fi
  line+=("${PYTHON:-.venv/bin/python}" -u -m "${MAIN:-bapo_jax.main}")
  line+=(${flags[@]+"${flags[@]}"} "--coordinator=127.0.0.1:$port")
  line+=("--process=$1" "--processes=$n")
}

numbered() { # each line of the input with a number in front; signals end the writer only
  trap '' INT TERM HUP
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
  trap 'pass_on TERM' TERM HUP
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

parse "$@"
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
