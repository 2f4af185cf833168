#!/usr/bin/env bash
# Measures the project on one GPU, the most valuable figures first.
#
#   bash benchmarks/on_gpu/on_gpu.sh [STAGE...]      all stages but p by default
#
#   a  the machine, versions, one product        d  log-probabilities and kernels
#   b  the main job of the README                e  RL steps of three sizes, and torch's
#   c  benchmarks.first_contact, correctness     f  memory: measured and planned; profile
#   r  benchmarks.first_contact, rates           p  parts of an update and of a token
#   m  benchmarks.first_contact, experts
#
# Each stage has a time limit, a log in $OUT and lines in the table at the end; a stage
# that fails does not end the others, but for a, without which there is no GPU. `on_gpu.sh
# a c` runs two of them, and `e:q15` one size of e. README.md says what each stage shows.
#
#   OUT     folder of logs and results             (runs/on_gpu)
#   WHEELS  folder of wheels to install, or empty  (.whl in the project's root)
#   TOTAL   seconds for everything                 (540)
#   SMALL   not empty: tiny sizes, for a dry run on a CPU
#   SLOW    factor on the limits of all stages, for a busy machine (1)
#   SITE    where the wheels are installed         (runs/site)
#   WORK    models, runs and compiled programs     (runs/work)
set -uo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
OUT=${OUT:-runs/on_gpu}
WHEELS=${WHEELS-$ROOT/.whl}
SITE=${SITE:-$ROOT/runs/site}
WORK=${WORK:-$ROOT/runs/work}
TOTAL=${TOTAL:-540}
SMALL=${SMALL:-}
SLOW=${SLOW:-1}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT" "$WORK"
OUT=$(cd "$OUT" && pwd) WORK=$(cd "$WORK" && pwd)
export OUT WORK SMALL PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRANSFORMERS_VERBOSITY=error TF_CPP_MIN_LOG_LEVEL=2
export JAX_COMPILATION_CACHE_DIR=$WORK/programs
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
WHOLE=0.92 # of the GPU's memory, as bapo_jax.main takes; benchmarks take JAX's 0.75
export XLA_PYTHON_CLIENT_MEM_FRACTION=$WHOLE
unset XLA_CLIENT_MEM_FRACTION # JAX refuses both
MODELS=(q05 q15 s135)
CHECKED=s135                      # its log-probabilities are compared
STAGES=(a c d e:q05 b e:q15 r m e:s135 f) # in the order of their value
[[ $SMALL ]] && MODELS=(tiny) CHECKED=tiny STAGES=(a c d e b r m p f)
(($#)) && STAGES=("$@")
: >>"$OUT/results.jsonl"

wants() { [[ " ${STAGES[*]} " == *" $1"[\ :]* ]]; }
left() { echo $((TOTAL - SECONDS)); }

# limited STAGE SECONDS COMMAND...: runs it within its limit and what is left.
limited() {
  # Eight files in all: f is logged in a.log, r and m in c.log, p in e.log.
  local log limit=$(($2 * SLOW))
  log=$OUT/$(sed 'y/frmp/acce/' <<<"$1").log
  shift 2
  ((limit > $(left) - 5)) && limit=$(($(left) - 5))
  if ((limit < 10)); then
    echo "no time left: $*" >>"$log"
    return 125
  fi
  echo "\$ $*  (at most $limit s)" >>"$log"
  timeout --signal=TERM --kill-after=10 "$limit" "$@" >>"$log" 2>&1
}

# result STAGE NAME STATUS SECONDS [FILE]: notes a result; FILE ends in a JSON object.
result() {
  "$PYTHON" -m benchmarks.on_gpu.table note "$OUT/results.jsonl" "$@"
}

# step STAGE NAME LIMIT COMMAND...: runs a command whose last line is JSON; notes it.
step() {
  local stage=$1 name=$2 limit=$3 begun=$SECONDS status out
  shift 3
  out=$WORK/$stage-${name//[^a-z0-9]/_}.out
  : >"$out"
  # shellcheck disable=SC2016  # the inner bash expands them
  limited "$stage" "$limit" bash -c '"${@:2}" | tee "$1"; exit "${PIPESTATUS[0]}"' _ \
    "$out" "$@"
  status=$?
  result "$stage" "$name" "$status" $((SECONDS - begun)) "$out"
  return "$status"
}

install() {
  export PYTHONPATH=$SITE:$ROOT${PYTHONPATH:+:$PYTHONPATH}
  cd "$ROOT" || exit
  [[ $WHEELS ]] && compgen -G "$WHEELS/*.whl" >/dev/null || return 0
  limited a 120 "$PYTHON" "$HERE/wheels.py" "$WHEELS" "$SITE"
  result a wheels $? "$SECONDS"
}

stage_a() {
  { nvidia-smi || echo 'no nvidia-smi'; } >>"$OUT/a.log" 2>&1
  step a machine 60 "$PYTHON" -m benchmarks.on_gpu.about
}

stage_b() {
  local flags=(--config.cache= --config.evaluate.every=40) begun=$SECONDS status
  [[ $SMALL ]] && flags+=(--config.steps=2 --config.sft.clean=5 --config.sft.noisy=2
    --config.problems.custom.train=128 --config.problems.custom.test=32)
  rm -rf "$WORK/main" # a run with a checkpoint would go on
  # A run that is not done at its limit gets SIGTERM, saves and keeps its metrics.
  limited b "${B_LIMIT:-95}" env -u JAX_COMPILATION_CACHE_DIR \
    "$PYTHON" -m bapo_jax.main --config=configs/aime.py \
    --workdir="$WORK/main" "${flags[@]}"
  status=$?
  "$PYTHON" -m benchmarks.on_gpu.table run "$WORK/main" >"$WORK/b.out" 2>>"$OUT/b.log"
  cat "$WORK/b.out" >>"$OUT/b.log"
  result b 'main job' "$status" $((SECONDS - begun)) "$WORK/b.out"
}

contact() { # STAGE NAME LIMIT FILE SECTION...
  local stage=$1 name=$2 limit=$3 file=$4
  shift 4
  local seconds=$((limit * SLOW))
  ((seconds > $(left) - 12)) && seconds=$(($(left) - 12))
  step "$stage" "$name" $((limit + 7)) "$PYTHON" -m benchmarks.on_gpu.contact \
    "$seconds" "$WORK/$file" "$@"
}

make_models() { # the models that the stages need, once
  [[ -f $WORK/models/all ]] && return
  local begun=$SECONDS status
  limited e 90 "$PYTHON" -m benchmarks.on_gpu.models "$WORK/models" \
    "${MODELS[@]}" "$CHECKED"
  status=$?
  ((status)) || : >"$WORK/models/all"
  result e models "$status" $((SECONDS - begun))
}

stage_d() {
  make_models
  step d 'torch log-probs' 60 "$PYTHON" -m benchmarks.on_gpu.check torch \
    "$WORK/models" "$CHECKED"
  step d 'kernels, log-probs' 110 "$PYTHON" -m benchmarks.on_gpu.check ours \
    "$WORK/models" "$CHECKED"
}

# Correctness needs no quiet GPU: the sections of c and all of d share it, a quarter each.
stage_c() {
  export XLA_PYTHON_CLIENT_MEM_FRACTION=0.22
  contact c parity 110 c-parity.json parity &
  contact c kernels 110 c-kernels.json kernels &
  wants d && stage_d &
  wait
  export XLA_PYTHON_CLIENT_MEM_FRACTION=$WHOLE
}

stage_r() {
  contact r speed "${R_LIMIT:-150}" c-speed.json rates 'decode 0.1M' 'train 0.1M' \
    'decode 1.5B' 'train 1.5B'
}

stage_m() { # kernels of experts, at least blocks, dense and that of auto
  contact m experts 110 c-experts.json experts
}

stage_e() { # [NAME...]
  local name trace names=("$@")
  (($#)) || names=("${MODELS[@]}")
  make_models
  for name in "${names[@]}"; do
    trace=()
    [[ $name == q05 || $name == tiny ]] && trace=(--trace="$WORK/trace")
    step e "ours $name" 170 "$PYTHON" -m benchmarks.on_gpu.ours "$WORK/models" "$name" \
      "${trace[@]}"
    step e "torch $name" 75 "$PYTHON" -m benchmarks.on_gpu.peer "$WORK/models" "$name"
  done
}

stage_p() { # [SECTION...]; its lines are in e.log
  export PARTS_LIMIT=$((185 * SLOW))
  step p parts 195 "$PYTHON" -m benchmarks.on_gpu.parts "$@"
}

stage_f() {
  step f memory 20 "$PYTHON" -m benchmarks.on_gpu.table memory "$OUT/results.jsonl" \
    "$HERE/planned.json"
}

keep() { # what is worth more than its log, in one file below the limit of 16 MiB
  local files=() each
  for each in c-parity.json c-kernels.json c-speed.json c-experts.json main/report.html \
    main/report.json main/report.html main/metrics.jsonl main/config.json; do
    [[ -e $WORK/$each ]] && files+=("$each")
  done
  ((${#files[@]})) && tar -czf "$OUT/kept.tar.gz" -C "$WORK" "${files[@]}"
}

install
for stage in "${STAGES[@]}"; do
  name=${stage%%:*} part=${stage#"$name"} begun=$SECONDS
  IFS=, read -ra parts <<<"${part#:}"
  [[ $name == d ]] && wants c && continue # it ran beside c
  if (($(left) < 15)); then
    result "$name" all 125 0
    continue
  fi
  declare -F "stage_$name" >/dev/null || { echo "no stage $name" >&2 && continue; }
  echo "stage $stage, ${begun} s" >&2
  "stage_$name" "${parts[@]}" && continue
  [[ $name == a ]] && tail -n 3 "$OUT/a.log" >&2 && break # without a GPU
done
keep
"$PYTHON" -m benchmarks.on_gpu.table show "$OUT/results.jsonl" | tee "$OUT/table.txt"
