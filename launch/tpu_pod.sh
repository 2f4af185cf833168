#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice, through gcloud.
# Usage: NAME=mine ZONE=us-east5-a launch/tpu_pod.sh [--dry-run] COMMAND [flags of main]
#   run      creates the slice unless it exists, copies the committed files, installs the
#            packages, starts one process per host, shows the output of the first and
#            fetches all outputs at the end; exits with the status of the first process
#   logs     fetches the output of every host to $LOGS (runs/pod/$NAME)
#   stop     lets the run save and end
#   delete   deletes the slice
# --dry-run prints the commands without running them.
# Needs bash and gcloud, signed in to a project with quota for the slice. Variables:
#   NAME, ZONE   the slice
#   TYPE         v5p-128 by default: 64 chips, since v5p counts two cores per chip
#   VERSION      the image of the hosts; v2-alpha-tpuv5, the default, is for v5p
#   SPOT=1       a slice that may be preempted
#   RESTARTS     3 by default, see launch/restarts.sh --help
#   PYTHON       python3.11 by default; installed if the image has none
#   SHARE        host:/path of an NFS folder (Filestore), mounted as ~/share on each host
# All hosts must see the model, the data and the workdir, for example
# --workdir=/home/$USER/share/runs/mine. The run continues when this machine is turned
# off; `logs` then fetches its output. After a preemption, `run` creates the slice again
# and resumes from the newest checkpoint. This file was never run on a TPU.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
case ${1:-} in -h | --help) usage && exit ;; esac

dry=''
if [[ ${1:-} == --dry-run ]]; then
  dry=1
  shift
fi
what=${1:-}
flags=("${@:2}")
NAME=${NAME:-bapo} TYPE=${TYPE:-v5p-128} VERSION=${VERSION:-v2-alpha-tpuv5}
PYTHON=${PYTHON:-python3.11} RESTARTS=${RESTARTS:-3}
tpus=(gcloud compute tpus tpu-vm)
place=("--zone=${ZONE:-us-east5-a}")
LOGS=${LOGS:-runs/pod/$NAME}
archive=$(mktemp -u).tar.gz

do_() { # runs "$@", or prints it
  if [[ $dry ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on() { # runs the text $2 on the worker $1, or on `all`
  do_ "${tpus[@]}" ssh "$NAME" "${place[@]}" "--worker=$1" "--command=$2"
}

state() { # READY, PREEMPTED ...; nothing where no slice has the name
  "${tpus[@]}" describe "$NAME" "${place[@]}" '--format=value(state)' 2> /dev/null || true
}

workers() { # how many hosts the slice has
  local found
  found=$("${tpus[@]}" describe "$NAME" "${place[@]}" \
    '--format=value(networkEndpoints[].ipAddress)')
  awk -F';' '{ print NF }' <<< "$found"
}

create() {
  local found=''
  if [[ ! $dry ]]; then found=$(state); fi
  case $found in
    READY | CREATING) return ;;
    '') ;;
    *) do_ "${tpus[@]}" delete "$NAME" "${place[@]}" --quiet ;; # taken away, or broken
  esac
  do_ "${tpus[@]}" create "$NAME" "${place[@]}" "--accelerator-type=$TYPE" \
    "--version=$VERSION" ${SPOT:+--spot}
}

install() {
  do_ git archive --format=tar.gz "--output=$archive" HEAD
  do_ "${tpus[@]}" scp "$archive" "$NAME:bapo_jax.tar.gz" "${place[@]}" --worker=all
  do_ rm -f "$archive"
  on all "set -e; mkdir -p bapo_jax; tar -xzf bapo_jax.tar.gz -C bapo_jax; cd bapo_jax
command -v $PYTHON > /dev/null || { sudo apt-get update
  sudo apt-get install -y $PYTHON $PYTHON-venv; }
test -d .venv || $PYTHON -m venv .venv
.venv/bin/pip install -q -r requirements/tpu.txt -c requirements/constraints.txt"
  if [[ ${SHARE:-} ]]; then
    on all "mountpoint -q share || { sudo apt-get install -y nfs-common; mkdir -p share
sudo mount -t nfs $SHARE share; }"
  fi
}

start() { # detached: a lost connection does not end the run
  local quoted=''
  if ((${#flags[@]})); then printf -v quoted '%q ' "${flags[@]}"; fi
  on all "cd bapo_jax; rm -f run.status
nohup setsid bash -c 'launch/restarts.sh $RESTARTS .venv/bin/python -u \
-m bapo_jax.main \"\$@\"; echo \$? > run.status' run $quoted > run.log 2>&1 < /dev/null &
echo \$! > run.pid"
}

follow() {
  on 0 'cd bapo_jax; tail -n +1 -F run.log 2> /dev/null &
until test -s run.status; do sleep 1; done; sleep 1; kill $!'
}

logs() {
  local i n=1
  if [[ ! $dry ]]; then n=$(workers); fi
  do_ mkdir -p "$LOGS"
  for ((i = 0; i < n; i++)); do
    do_ "${tpus[@]}" scp "$NAME:bapo_jax/run.log" "$LOGS/$i.log" \
      "${place[@]}" "--worker=$i"
  done
}

case $what in
  run)
    create
    install
    start
    follow
    logs
    if [[ $dry ]]; then
      on 0 'cat bapo_jax/run.status'
    else
      exit "$(on 0 'cat bapo_jax/run.status')"
    fi
    ;;
  logs) logs ;;
  stop) on all "pkill -TERM -P \$(cat bapo_jax/run.pid) -f restarts.sh" ;;
  delete) do_ "${tpus[@]}" delete "$NAME" "${place[@]}" --quiet ;;
  *)
    echo 'Usage: launch/tpu_pod.sh [--dry-run] run|logs|stop|delete [flags of main]' \
      '(--help explains)' >&2
    exit 2
    ;;
esac
