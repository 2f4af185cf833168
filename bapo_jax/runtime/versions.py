"""What this program is: its source, Python, and the packages that results depend on."""

import contextlib
import hashlib
import importlib.metadata
import pathlib
import platform

PACKAGES = (
  'jax',
  'jaxlib',
  'libtpu',
  'flax',
  'optax',
  'orbax-checkpoint',
  'numpy',
  'transformers',
  'tokenizers',
  'math-verify',
  'sympy',
)


def all_of_them() -> dict[str, str]:
  """Name -> version; of this package twelve digits that change with any source file."""
  found = {'code': _source(), 'python': platform.python_version()}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def _source() -> str:
  """Digits of the source files of this package, wherever it lies."""
  root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    digest.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  return digest.hexdigest()[:12]
