"""Identifies this program: its source, Python, and packages that change results."""

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
  """Returns name -> version; 'code' is a digest of the source files of this package."""
  root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    digest.update(f'{path.relative_to(root)}\n'.encode() + path.read_bytes())
  versions = {'code': digest.hexdigest()[:12], 'python': platform.python_version()}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions
