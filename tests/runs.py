"""Tiny runs: their configs, command lines and workdirs, and the four recorded runs."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import making
import numpy as np
import orbax.checkpoint as ocp
import pictured
import pytest
from flax import traverse_util

from bapo_jax.data import prompt_rules
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.run import experiment, resume
from bapo_jax.runtime import metrics
from bapo_jax.runtime import workdir as workdir_lib
from bapo_jax.training import build, checkpoint, config, needs
from bapo_jax.training.config import Config
from bapo_jax.training.state import TrainState
from bapo_jax.types import ReplayBuffer, Tree
from configs import base

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / 'configs' / 'aime.py'
# Of the tests, without their number of devices: children find programs in the cache.
GIVEN = os.environ.get('XLA_FLAGS', '').split()
FLAGS = ' '.join(flag for flag in GIVEN if 'device_count' not in flag)
CHAINS = f'{ROOT}/tests/chains.py:chains'
TINY: dict[str, Any] = {
  'steps': 4,
  'sft.width': 16,
  'sft.layers': 1,
  'sft.heads': 2,
  'sft.kv_heads': 2,
  'sft.head_width': 8,
  'sft.ffn': 16,
  'problems.source': CHAINS,  # one guess in ten is right: something to learn
  'problems.test_source': CHAINS,
  'prompts.count': 8,
  'sampler.group_size': 4,
  'sampler.max_new_tokens': 12,
  'sampler.max_num_seqs': 32,
  'sampler.prefill_batch_size': 16,
  'sampler.tokens_per_dispatch': 6,
  'learner.minibatches': 2,
  'sft.clean': 60,
  'sft.noisy': 1,
  'sft.batch': 16,
  'buffer.capacity': 8,
  'buffer.reevaluate': 4,
  'buffer.reeval_interval': 1,
  'evaluate.every': 2,
  'checkpoint.every': 1,
  'metrics.tensorboard': False,
  'mesh.data': 1,
}
TIMED = re.compile('time/|overlap/|per_s')  # metrics that differ in every run
# A Llama of the hub, in miniature.
SOURCE: dict[str, Any] = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'vocab_size': 40,
  'hidden_size': 16,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 16,
  'intermediate_size': 24,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': False,
  'dtype': 'float16',
  'rope_parameters': {
    'rope_type': 'llama3',
    'rope_theta': 1e4,
    'factor': 4.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 16,
  },
  'initializer_range': 0.123,  # of no use to us, and preserved
}


def plain(**overrides: Any) -> dict[str, Any]:
  """Returns the values of a config file with these knobs (dotted names)."""
  return config.merged(base.get_config().to_dict(), overrides)


def tiny(**overrides: Any) -> Config:
  """Returns the config of a tiny run with these knobs (dotted names)."""
  return config.parse(plain(**TINY | overrides))


def flags(
  file: str | os.PathLike = CONFIG, given: Sequence[str] = (), **overrides: Any
) -> list[str]:
  """Returns the overrides of a tiny run of a config file, beside `given` ones.

  Leaves out the knobs of TINY that have no effect, which the command line refuses.
  """
  made = [f'--config.{name}={value}' for name, value in overrides.items()]
  rest = {name: value for name, value in TINY.items() if name not in overrides}
  tiny = {name: f'--config.{name}={value}' for name, value in rest.items()}
  values = config.load(str(file))
  found = config.overrides([*tiny.values(), *made, *given], values)
  merged = config.merged(values, found)
  # Not parsed: a knob without an effect may not fit, such as too small a buffer.
  inert = needs.inert(Config.model_validate(merged))
  return [flag for name, flag in tiny.items() if name not in inert] + made


def command(workdir: str | os.PathLike, **overrides: Any) -> dict[str, Any]:
  """Returns the arguments of subprocess.run for a tiny run on one device."""
  arguments = [sys.executable, '-m', 'bapo_jax.main', f'--config={CONFIG}']
  return {
    'args': [*arguments, f'--workdir={workdir}', *flags(**overrides)],
    'cwd': ROOT,
    'env': os.environ | {'XLA_FLAGS': FLAGS, 'PYTHONUNBUFFERED': '1'},
  }


MakeVerifier = Callable[[], Verifier] | None  # None: as the config says


def train(
  config: Config,
  workdir: str | os.PathLike,
  verifier: MakeVerifier = None,
  devices: int = 1,
) -> int:
  """Trains on the first devices of this process; returns the exit status."""
  with on_devices(devices), pytest.MonkeyPatch.context() as patch:
    if verifier is not None:
      patch.setattr(build, 'make_verifier', lambda config: verifier())
    return experiment.train(config, str(workdir))


class Saved(NamedTuple):
  """A run as read from its workdir."""

  scalars: dict[str, int]  # of the state, its step among them
  arrays: dict[str, Any]  # of the state, as nested dicts of host arrays
  rows: dict[int, dict[str, str]]  # step -> metrics except for times


def last_run(workdir: str | os.PathLike, step: int | None = None) -> Saved:
  """Reads the run in the workdir after `step`, or after its newest checkpoint."""
  steps = workdir_lib.checkpoint_steps(str(workdir))
  step = max(steps) if step is None else step
  path = os.path.join(os.path.abspath(workdir), 'checkpoints', str(step))
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    leaves = checkpointer.metadata(f'{path}/arrays').item_metadata.tree
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
    arrays = checkpointer.restore(
      f'{path}/arrays', args=ocp.args.PyTreeRestore(restore_args=on_host)
    )
  meta = json.loads(pathlib.Path(path, 'meta', 'metadata').read_text())
  # As text, because nan != nan: a length is nan if no response is of its kind.
  rows = {
    int(row['step']): {k: repr(row[k]) for k in row if not TIMED.search(k)}
    for row in metrics.read(str(workdir))
    if row['step'] <= step
  }
  return Saved(meta['run'], arrays, rows)


def same(a: Tree, b: Tree) -> bool:
  """Returns whether two trees have the same structure and values, bit for bit."""
  if jax.tree.structure(a) != jax.tree.structure(b):
    return False
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


@contextlib.contextmanager
def on_devices(count: int) -> Iterator[None]:
  """Hides all but the first of the eight devices, as a run on a laptop needs."""
  devices = jax.devices()[:count]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda *_: devices)
    yield


def shared(
  factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]
) -> pathlib.Path:
  """Returns a directory that `make` fills, once per session, for all workers."""
  root = factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:  # each worker has a directory below it
    root = root.parent
  path = root / name
  with open(root / f'{name}.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not path.exists():
      make(root / f'{name}.part')
      (root / f'{name}.part').rename(path)
  return path


def copied(source: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
  """Copies a workdir; returns the copy."""
  shutil.copytree(source, to)
  return to


class Recorded(NamedTuple):
  """A finished run: tests read its workdir, and copy it before they change it."""

  config: Config
  workdir: pathlib.Path
  verifier: MakeVerifier = None


# The four runs that serve every test of a finished run, each with all checkpoints.
STEPS = {'checkpoint.keep': 99, 'rollout.weight_sync_interval': 2}
BOTH = {'batch.rule': 'adapted', 'clip.rule': 'balanced'} | STEPS
PARTIAL = {'rollout.max_off_policy_steps': 1, 'rollout.max_tokens_per_step': 6.0}
MY = f'{ROOT}/tests/my_functions.py'
TALK = {'rollout.environment': f'{MY}:answer', 'rollout.max_turns': 3}
# Responses of up to five tokens are right, and every group teaches.
BRIEF = {'rewards.rule': f'{MY}:brief', 'rewards.right_from': 1 / 6}
ROUTED = {'sft.experts': 4, 'sft.ffn': 8}
PICTURES = PARTIAL | {'rollout.max_tokens_per_step': 5.0, 'optimizer.lr': 1e-2}
RECORDED: dict[str, dict[str, Any]] = {
  'whole': BOTH,
  'partial': BOTH | PARTIAL | {'steps': 24, 'evaluate.every': 4},
  'pictures': pictured.DRAWN | BOTH | PICTURES,
  'adapters': STEPS | {'lora.rank': 2, 'optimizer.lr': 1e-2},
}


def recorded(factory: pytest.TempPathFactory, name: str) -> Recorded:
  """Returns the recorded run of this name; the first call of a session trains it.

  Models that are not trained first are rewarded for responses of an odd length.
  """
  knobs = RECORDED[name]
  if name == 'adapters':
    knobs = knobs | {'model.path': str(shared(factory, 'llama', source))}
  made = tiny(**knobs)
  verifier = None if name in ('whole', 'partial') else making.OddVerifier

  def make(workdir: pathlib.Path) -> None:
    assert train(made, workdir, verifier) == 0

  return Recorded(made, shared(factory, f'recorded_{name}', make), verifier)


def truncated(run: Recorded, to: pathlib.Path, step: int) -> pathlib.Path:
  """Copies a recorded run as if it had been killed after the checkpoint of `step`."""
  copied(run.workdir, to)
  for saved_step in workdir_lib.checkpoint_steps(str(to)):
    if saved_step > step:
      shutil.rmtree(to / 'checkpoints' / str(saved_step))
  for folder in ('groups', 'eval'):
    for path in (to / folder).iterdir():
      if int(path.stem) > step:
        path.unlink()
  for path in to.glob('report.*'):
    path.unlink()
  return to


def source(path: pathlib.Path) -> str:
  """Writes a Hugging Face model: weights, config, tokenizer, generation config."""
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(SOURCE))
  spec = hf_config.read_spec(str(path), 'float32')
  flat = traverse_util.flatten_dict(making.params(spec), sep='/')
  hf_weights.save(str(path), flat.__getitem__, spec, 'bfloat16')
  tokenizer = tokenizer_lib.load(tokenizer_lib.EMBEDDED, '').backend
  tokenizer.chat_template = f'Q: {tokenizer.chat_template}'
  tokenizer.save_pretrained(path)
  ends = {'eos_token_id': [1, 4], 'top_p': 0.95, 'do_sample': True}
  (path / 'generation_config.json').write_text(json.dumps(ends))
  return str(path)


def numbers(state: TrainState) -> dict[str, int]:
  """Returns the plain numbers of a state, as a checkpoint stores them."""
  return {name: getattr(state, name) for name in resume.SCALARS}


def saved(workdir: str | os.PathLike, params: Tree) -> None:
  """Saves a checkpoint of step 1 with these weights, laid out as a run's."""
  ones = jnp.ones(3)
  actor = jax.tree.map(lambda x: x + 1, params)
  buffer = ReplayBuffer(*[ones] * len(ReplayBuffer._fields))
  history = prompt_rules.no_history(0)
  state = TrainState(params, (ones,), actor, buffer, history, step=1)
  arrays = {name: getattr(state, name) for name in ('params', 'opt', 'actor', 'buffer')}
  with checkpoint.manager(str(workdir), 2) as checkpoints:
    checkpoint.save(checkpoints, 1, arrays, {'run': numbers(state)})
