"""Runs the command line: python -m bapo_jax."""

from bapo_jax.main import cli

if __name__ == '__main__':
  cli()
