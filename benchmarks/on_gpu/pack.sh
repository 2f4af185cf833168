#!/usr/bin/env bash
# Puts the wheels that a bare GPU machine lacks into .whl/, which git ignores. Carry the
# tree with .whl/; `bash .whl/kit/on_gpu.sh` runs there.
#
#   bash benchmarks/on_gpu/pack.sh       on Linux with git, pip and a package index
#
# The machine has Python 3.12 on x86-64, jax 0.11.2 and the packages listed in README.md.
# Versions are those of requirements/constraints.txt, except flax: 0.12.12 is for jax
# 0.11 and 0.12.
#
#   FOLDER     where the wheels go                 (.whl in the project's root)
#   PIP        the pip to use                      (python3 -m pip)
#   LIMIT_MIB  most MiB of the tree and the wheels (60)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
FOLDER=${FOLDER:-.whl}
PIP=${PIP:-python3 -m pip}
LIMIT_MIB=${LIMIT_MIB:-60}

MISSING=( # not on the machine
  pydantic==2.14.3
  pydantic_core==2.50.4
  annotated-types==0.8.0
  typing-inspection==0.4.5
  ml_collections==1.1.0
  tensorboardX==2.6.5
  math-verify==0.9.0
  latex2sympy2_extended==1.11.0
  antlr4-python3-runtime==4.13.2
  jaxtyping==0.3.11
  wadler_lindig==0.1.8
)
PEERS=( # for `attention` of parts.py only; the newest for Python 3.12 and jax 0.11
  tokamax==0.0.17
  qwix==0.1.8
  einshape==1.0
  immutabledict==4.3.1
)
NEWER=( # there in unknown versions; the project has a minimum, and they are small
  typing_extensions==4.16.0
  absl-py==2.5.1
  flax==0.12.12
  optax==0.2.8
  orbax-checkpoint==0.12.8
  chex==0.1.92
  rich==15.0.0
  etils==1.15.0
  tensorstore==0.1.86
)

platforms=()
for tag in manylinux_2_39 manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 \
  manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
rm -rf "$FOLDER" # two versions of one package would stop the installation
# shellcheck disable=SC2086  # PIP is a command with arguments
$PIP download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d "$FOLDER" "${MISSING[@]}" "${NEWER[@]}" \
  "${PEERS[@]}"

mkdir "$FOLDER/kit"
cat >"$FOLDER/kit/on_gpu.sh" <<'END'
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../benchmarks/on_gpu/on_gpu.sh" "$@"
END

tree=$(git ls-files -z --cached --others --exclude-standard |
  { du -cb --files0-from=- 2>/dev/null || true; } | tail -1 | cut -f1)
carried=$(du -cb "$FOLDER" | tail -1 | cut -f1)
files=("$FOLDER"/*.whl)
echo "${#files[@]} wheels, $((carried >> 10)) KiB; the tree," \
  "$((tree >> 10)) KiB; together $(((carried + tree) >> 20)) of $LIMIT_MIB MiB"
((carried + tree < LIMIT_MIB << 20)) || {
  echo 'too large' >&2
  exit 2
}
