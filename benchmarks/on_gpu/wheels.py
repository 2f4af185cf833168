"""Installs the wheels of a folder that are missing here, or newer than what is here.

  python benchmarks/on_gpu/wheels.py FOLDER TARGET

Runs before the project's requirements are there, so it imports nothing of the project.
"""

import importlib.metadata
import pathlib
import subprocess
import sys

from packaging.utils import parse_wheel_filename
from packaging.version import Version

OPTIONS = '-q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target'


def main() -> None:
  """Installs the wheels and prints which were taken."""
  folder, target = sys.argv[1:]
  taken = []
  for path in sorted(pathlib.Path(folder).glob('*.whl')):
    name, version, _, _ = parse_wheel_filename(path.name)
    try:
      there = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      there = ''
    older = not there or Version(there) < version
    print(f'{name:25} {there or "missing":12} {version} {"taken" if older else ""}')
    if older:
      taken.append(str(path))
  if taken:
    pip = [sys.executable, '-m', 'pip', 'install', *OPTIONS.split(), target]
    subprocess.run([*pip, *taken], check=True)


if __name__ == '__main__':
  main()
