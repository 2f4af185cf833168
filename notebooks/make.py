"""Makes the recordings that the notebooks read, and the picture of the README.

  python -m notebooks.make NAME [--workdir=WORKDIR]

NAME       writes               from
batch      2_batch.npz          the newest checkpoint of WORKDIR, a run of the embedded
                                default; the stored file is from a run of 20 steps
history    3_history.npz        a new run of 40 steps
runs       4_runs/              two new runs of 80 steps, three minutes of one core
record     5_run/               a run of 20 steps in WORKDIR, resumed if it exists
smollm2    9_smollm2.jsonl      the newest recorded step of WORKDIR, a published model
trl        9_trl.jsonl          TRL; needs requirements/peers.txt and torch
trl_run    10_trl_run.jsonl     the same packages; twenty steps of TRL
picture    docs/two_rules.png   2_batch.npz and 3_history.npz

The WORKDIR of `smollm2` is made by the command below, stopped by Ctrl-C after its first
step. M is SmolLM2-135M-Instruct, unpacked from four bits to float32; the problems are
sums and differences of numbers below 60, 'What is 39 + 14?':

  python -m bapo_jax.main --config=configs/finetune.py --workdir=runs/smollm2 \\
    --config.model.path=M --config.problems.source=train.jsonl \\
    --config.problems.test_source=test.jsonl --config.steps=4 \\
    --config.prompts.count=16 --config.learner.minibatches=4 \\
    --config.rollout.weight_sync_interval=4 --config.optimizer.lr=1e-5 \\
    --config.sampler.max_new_tokens=48
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bapo_jax.algorithms import clip, loss
from bapo_jax.data import synthetic
from bapo_jax.learner import learner
from bapo_jax.models import layers, transformer
from bapo_jax.run import experiment, resume, step_record
from bapo_jax.run.panels import PANELS
from bapo_jax.runtime import digests, metrics
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import build, checkpoint, inputs, trainer
from bapo_jax.training import config as config_lib
from bapo_jax.training.config import Config
from bapo_jax.types import SOURCES, Groups, concat, take
from configs import base
from lab import claims, neutral_record, plots, rule_curves

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
BATCH, HISTORY = HERE / '2_batch.npz', HERE / '3_history.npz'
AIME = ROOT / 'bapo_jax' / 'policies' / 'fe01bae9c828'  # the policy of configs/aime.py
GUIDE = ROOT / 'docs' / 'guide' / 'from_trl.md'
MOVES = ('entered', 'promoted', 'graduated', 'progressed', 'evicted')
TRL_ON_CPU = {  # arguments of a GRPOConfig
  'use_cpu': True,
  'bf16': False,
  'gradient_checkpointing': False,
  'beta': 0.0,
  'seed': 0,
  'logging_steps': 1,
  'save_strategy': 'no',
  'report_to': [],
  'disable_tqdm': True,
}
TARGET = 0.457  # above the share of 2_batch.npz at the first bounds, so that they move


def embedded(knobs: dict[str, Any]) -> Config:
  """Returns the embedded default with other knobs."""
  return config_lib.parse(config_lib.merged(base.get_config().to_dict(), knobs))


def batch(workdir: str) -> None:
  """Stores one stale minibatch of a run: eight groups, 32 updates after sampling."""
  config = embedded({})
  t, s = build.start(config, PhaseTimer())
  with checkpoint.manager(workdir, config.checkpoint.keep) as checkpoints:
    s, _ = resume.resume(checkpoints, t, s)
  keys = trainer.step_keys(config.seed, s.step)
  s = trainer.sync_actor_if_due(t, s)
  s, sampled = trainer.sample(t, s)
  groups = sampled.fresh.groups
  source_P = jnp.zeros(len(groups.id_P), jnp.int32)
  later = s
  for i in range(4):  # learner steps on one rollout, of eight updates each
    later, _ = trainer.update(
      t, later, groups, source_P, jax.random.fold_in(keys.update, i)
    )
  rate_P = np.asarray(groups.correct_PG).mean(1)
  learnable = np.flatnonzero((rate_P > 0) & (rate_P < 1))[:8]
  rows = learner.flatten(
    take(groups, learnable), source_P[learnable], t.config.advantage
  )
  loss_mask_BT = np.asarray(rows.loss_mask_BT)
  # Log-probabilities [B, T-1, V] of every token after each column but the last.
  hidden_BTD = layers.forward(later.params, rows.tokens_BT, t.spec)[:, :-1]
  logits_BTV = jnp.einsum('btd,vd->btv', hidden_BTD, transformer.head(later.params))
  logp_BTV = np.asarray(jax.nn.log_softmax(logits_BTV / config.sampler.temperature))
  used = int(np.flatnonzero(loss_mask_BT.any(0))[-1]) + 1  # columns
  np.savez_compressed(
    BATCH,
    allow_pickle=False,
    tokens_BT=np.asarray(rows.tokens_BT[:, :used], np.int16),
    loss_mask_BT=loss_mask_BT[:, :used],
    behavior_logp_BT=np.asarray(rows.behavior_logp_BT[:, :used]),
    adv_B=np.asarray(rows.adv_BT[:, 0]),
    # Only the N tokens of the loss mask, row by row.
    logp_NV=logp_BTV[loss_mask_BT[:, 1:]].astype(np.float16),
    step=np.asarray(s.step),
  )


def history() -> None:
  """Stores a short run of the rule `adapted`, step by step.

  The run has 96 problems, each of which is asked every third step, and little room in
  the replay buffer. A step has the sampled problems with their number of right
  responses, the groups of the batch with their sources, and the problems that the
  buffer has afterwards; -1 marks an empty row.
  """
  config = embedded({
    'steps': 40,
    'problems.custom.train': 96,
    'problems.custom.test': 64,
    'prompts.count': 32,
    'sft.clean': 250,
    'sft.noisy': 0,
    'sft.batch': 64,
    'batch.rule': 'adapted',
    'rollout.weight_sync_interval': 2,
    'buffer.capacity': 12,
    'buffer.reevaluate': 6,
    'buffer.reeval_interval': 4,
  })  # fmt: skip
  steps = []
  t, s = build.start(config, PhaseTimer())
  while not trainer.finished(t, s):  # the lines of `trainer.train_loop`
    keys = trainer.step_keys(config.seed, s.step)
    s = trainer.sync_actor_if_due(t, s)
    s, sampled = trainer.sample(t, s)
    s, fresh, seats, source_P = trainer.fill_batch(t, s, sampled, keys)
    s = trainer.free_actor_if_due(t, s)
    s, _ = trainer.update(t, s, seats, source_P, keys.update)
    s, moves = trainer.insert(t, s, fresh, sampled.reevaluated, seats, source_P)
    s = s.replace(step=s.step + 1)

    asked = concat(*(rollout.groups for rollout in fresh))
    hard = sampled.reevaluated.groups
    padding = (0, config.buffer.reevaluate - len(hard.id_P))
    row = {
      'source_SP': source_P,
      'batch_id_SP': seats.id_P,
      'fresh_id_SP': asked.id_P,
      'fresh_correct_SP': num_correct(asked),
      'reevaluated_id_SR': np.pad(hard.id_P, padding, constant_values=-1),
      'reevaluated_correct_SR': np.pad(num_correct(hard), padding, constant_values=-1),
    }
    for part in ('hard', 'reusable'):
      groups = getattr(s.buffer, part)
      row[f'{part}_id_SN'] = np.where(groups.completed_step_P < 0, -1, groups.id_P)
    row |= {f'{name}_S': np.int32(moves[f'buffer/{name}']) for name in MOVES}
    steps.append(jax.device_get(row))
  columns = {
    k: np.asarray([row[k] for row in steps]).astype(np.int16) for k in steps[0]
  }
  group_size = config.sampler.group_size
  np.savez_compressed(HISTORY, allow_pickle=False, **columns, group_size=group_size)


def num_correct(groups: Groups) -> np.ndarray:
  """Returns the number of right responses per group; -1 for an empty row."""
  return np.where(groups.completed_step_P < 0, -1, groups.correct_PG.sum(1))


def runs() -> None:
  """Stores GRPO and both methods of the project, trained from one policy.

  A stored run has the config, the metrics that the notebook draws, and six groups of
  the last step, in the files of a workdir.
  """
  names = {name for panel in PANELS for name in panel.labels}
  names |= {'step', 'eval/stderr'}
  with tempfile.TemporaryDirectory() as scratch:
    for name, clip_rule, batch_rule in (
      ('grpo', 'fixed', 'fresh_only'),
      ('both', 'balanced', 'adapted'),
    ):
      config = embedded({
        'steps': 80,
        'clip.rule': clip_rule,
        'batch.rule': batch_rule,
        'rollout.weight_sync_interval': 2,
        'evaluate.every': 10,
        'metrics.tensorboard': False,
      })  # fmt: skip
      workdir, folder = pathlib.Path(scratch, name), HERE / '4_runs' / name
      experiment.train(config, str(workdir))
      copy_step(workdir, folder, 6)
      rows = [{k: r[k] for k in r if k in names} for r in metrics.read(workdir)]
      lines = [metrics.to_json({k: round(v, 5) for k, v in r.items()}) for r in rows]
      (folder / 'metrics.jsonl').write_text('\n'.join([*lines, '']))


def copy_step(workdir: pathlib.Path, folder: pathlib.Path, groups: int | None) -> int:
  """Copies the config and the newest recorded groups; returns their step."""
  shutil.rmtree(folder, ignore_errors=True)
  (folder / step_record.FOLDER).mkdir(parents=True)
  shutil.copy(workdir / 'config.json', folder)
  step = step_record.newest(str(workdir))
  assert step is not None, f'{workdir} has no recorded step'
  path = f'{step_record.FOLDER}/{step}.jsonl'
  lines = (workdir / path).read_text().splitlines(keepends=True)
  (folder / path).write_text(''.join(lines[:groups]))
  return step


def record(workdir: str = '') -> None:
  """Stores a step of GRPO in the setting of the first paper's main comparison.

  The seed is one for tuning. Stored are config, groups and checkpoint of the last step.
  """
  paper = claims.load(str(ROOT / 'papers' / 'balanced_po'))
  level, updates = paper.MAIN
  knobs = paper.ARMS['grpo'] | paper.IMBALANCE[level] | paper.UPDATES[updates]
  seed = paper.TUNING[0]
  knobs |= {'title': 'pair, GRPO, sixteen updates', 'steps': 20, 'evaluate.every': 20}
  knobs |= {'seed': seed, 'sft.seed': seed}
  config = config_lib.parse(config_lib.merged(paper.shared(), knobs))
  with tempfile.TemporaryDirectory() as scratch:
    source, folder = pathlib.Path(workdir or scratch), HERE / '5_run'
    status = experiment.train(config, str(source))
    assert status == 0, f'the run ended with status {status}'
    step = copy_step(source, folder, None)
    store_weights(config, str(source), step, folder)


def store_weights(
  config: Config, workdir: str, step: int, folder: pathlib.Path
) -> None:
  """Writes <folder>/checkpoints.zip: a checkpoint's weights, without the optimiser."""
  read = checkpoint.read_params(workdir, step)
  names = transformer.describe(inputs.open_model(config).spec)
  params = transformer.unflatten({name: read(name) for name in names})
  with tempfile.TemporaryDirectory() as scratch:
    with checkpoint.manager(scratch, 1) as checkpoints:
      checkpoint.save(checkpoints, step, {'params': params}, {'weights_only': True})
      checkpoint.wait(checkpoints)
    newest = pathlib.Path(checkpoint.home(scratch), str(step))
    for path in newest.rglob('commit_success.txt'):
      path.write_text('')  # the text is the path of the workdir; only the file matters
    digests.write(str(newest), str(step))
    shutil.make_archive(str(folder / 'checkpoints'), 'zip', newest.parent)


def smollm2(workdir: str) -> None:
  """Stores the recorded groups of a step that have advantages."""
  step = step_record.newest(workdir)
  assert step is not None, f'{workdir} has no recorded step'
  groups = [g for g in step_record.read(workdir, step) if step_record.taught(g)]
  path = HERE / '9_smollm2.jsonl'
  path.unlink(missing_ok=True)
  neutral_record.append(path, **columns(groups))


def columns(groups: list[dict[str, Any]]) -> dict[str, list[Any]]:
  """Returns the arguments of `neutral_record.append` for the groups of a step.

  A response without log-probabilities of the learner, or left out of the loss, has no
  tokens: its reward counts. Groups are numbered, since a step may have two groups of a
  problem.
  """
  names = neutral_record.COLUMNS.items()
  rows = []
  for number, group in enumerate(groups):
    for response in group['responses']:
      used = response['learner_logp'] and response['taught']
      row = {name: response[key] if used else [] for name, key in names}
      row |= {'group': number, 'reward': response['reward']}
      rows.append(row | {'update': group['update'] or 0})
  return {name: [row[name] for row in rows] for name in rows[0]}


def documented(name: str) -> str:
  """Returns the code of docs/guide/from_trl.md under this name."""
  code = re.search(rf'```python\n# {name}\n(.*?)```', GUIDE.read_text(), re.DOTALL)
  assert code, f'{GUIDE} has no code for {name}'
  return code[1]


def trl() -> None:
  """Stores a batch of TRL, recorded by the trainer class of docs/guide/from_trl.md.

  A random policy of two layers writes digits and earns 1 for a 4 or a 7: four prompts
  of four responses, two optimiser updates on them and two passes. Stored is the second
  pass, whose ratios are not 1. Prints the shares of tokens that TRL's own loss clips in
  the updates of that pass, for tests/lab/test_neutral_record.py.
  """
  import torch
  import transformers
  import trl
  from datasets import Dataset
  from tokenizers import Tokenizer, models, pre_tokenizers

  names: dict[str, Any] = {
    'torch': torch,
    'trl': trl,
    'neutral_record': neutral_record,
  }
  exec(documented('TRL'), names)
  torch.manual_seed(0)
  vocabulary = {x: i for i, x in enumerate(['<pad>', '<eos>', *'0123456789=+'])}
  backend = Tokenizer(models.WordLevel(vocabulary, unk_token='<pad>'))
  backend.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token='<pad>', eos_token='<eos>'
  )
  config = transformers.LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    initializer_range=0.3,
  )

  def reward(completions: list[str], **_: Any) -> list[float]:
    return [float('4' in text or '7' in text) for text in completions]

  with tempfile.TemporaryDirectory() as folder:
    args = trl.GRPOConfig(
      output_dir=folder,
      per_device_train_batch_size=8,
      gradient_accumulation_steps=1,
      steps_per_generation=2,
      num_iterations=2,
      num_generations=4,
      max_completion_length=12,
      max_steps=4,
      learning_rate=0.002,
      **TRL_ON_CPU,
    )
    peer = names['Recorded'](
      model=transformers.LlamaForCausalLM(config),
      reward_funcs=reward,
      args=args,
      train_dataset=Dataset.from_list(
        [{'prompt': x} for x in ('1+2=', '3+4=', '5+6=', '7+8=')]
      ),
      processing_class=tokenizer,
    )
    os.chdir(folder)
    peer.train()
    for row in peer.state.log_history[2:4]:
      print(json.dumps({x: row[f'clip_ratio/{x}_mean'] for x in ('low', 'high')}))
    shutil.copy('batch-1.jsonl', HERE / '9_trl.jsonl')


def recorded_rows(x: Any, rewards: list[float]) -> Iterator[dict[str, Any]]:
  """Yields the responses of a batch of TRL, as rollout.records names the fields."""
  for i, reward in enumerate(rewards):
    sampled = x['completion_mask'][i].bool()
    # Computed before the first update on the batch: by the policy that sampled.
    logp = x['old_per_token_logps'][i][sampled].tolist()
    yield {
      'reward': reward,
      'prompt': x['prompt_ids'][i][x['prompt_mask'][i].bool()].tolist(),
      'tokens': x['completion_ids'][i][sampled].tolist(),
      'behavior_logp': [round(nats, 4) or 0 for nats in logp],
    }


def trl_run() -> None:
  """Stores all responses of a run of TRL, as rollout.records reads them.

  TRL trains the policy of configs/aime.py on 320 of its problems, without repetition:
  20 steps of 16 groups of 8 responses, with four optimiser updates per step. Stored is
  a line per response, with log-probabilities of four decimals and the reward of TRL,
  1 for the right answer.
  """
  import torch
  import transformers
  import trl
  from datasets import Dataset

  path = HERE / '10_trl_run.jsonl'
  path.unlink(missing_ok=True)

  class Recorded(trl.GRPOTrainer):
    def _calculate_rewards(self, inputs: Any, *rest: Any) -> Any:
      self.reward_BR = super()._calculate_rewards(inputs, *rest)
      return self.reward_BR

    def _generate_and_score_completions(self, inputs: Any) -> Any:
      x = super()._generate_and_score_completions(inputs)
      step = self._step // self.args.steps_per_generation
      with path.open('a') as file:
        for i, row in enumerate(recorded_rows(x, self.reward_BR.sum(1).tolist())):
          row |= {'step': step, 'group': i // self.num_generations}
          file.write(json.dumps(row, separators=(',', ':')) + '\n')
      return x

  def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    boxed = [rf'\boxed{{{x}}}' for x in answer]
    return [float(x in text) for x, text in zip(boxed, completions, strict=True)]

  torch.manual_seed(0)
  rows = synthetic.synthetic('train')[:320]
  problems = [
    {'prompt': f'{row["problem"]}\n', 'answer': str(row['answer'])} for row in rows
  ]
  with tempfile.TemporaryDirectory() as folder:
    args = trl.GRPOConfig(
      output_dir=folder,
      per_device_train_batch_size=32,
      gradient_accumulation_steps=1,
      steps_per_generation=4,
      num_generations=8,
      max_completion_length=40,
      max_steps=80,
      learning_rate=3e-4,
      lr_scheduler_type='constant',
      **TRL_ON_CPU,
    )
    peer = Recorded(
      model=transformers.AutoModelForCausalLM.from_pretrained(AIME),
      reward_funcs=right,
      args=args,
      train_dataset=Dataset.from_list(problems),
      processing_class=transformers.AutoTokenizer.from_pretrained(AIME),
    )
    peer.train()


def picture() -> None:
  """Draws docs/two_rules.png: clip bounds on one minibatch, and seats by source."""
  plt.switch_backend('agg')
  fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout='constrained')
  draw_bounds(axes[0])
  draw_seats(axes[1])
  plots.save(fig, ROOT / 'docs' / 'two_rules.png', 100)


def draw_bounds(axis: Axes) -> None:
  """Draws ratio and advantage of each token, and the bounds of two clip rules."""
  logp_BT, rows = rule_curves.recorded(BATCH)
  ratio_BT = loss.ratio(logp_BT, rows)
  scale_B = loss.row_scale(rows.loss_mask_BT, 'token', 1)
  data = ratio_BT, rows, loss.weigher(loss.Clipped(), logp_BT, rows, scale_B)
  adv_BT = rows.adv_BT
  for sign, colour in ((1, '#0072B2'), (-1, '#D55E00')):
    kind_BT = rows.loss_mask_BT & (sign * adv_BT > 0)
    x_N, y_N = ratio_BT[kind_BT], adv_BT[kind_BT]
    axis.plot(x_N, y_N, '.', color=colour, ms=5, alpha=0.35, markeredgewidth=0)
  for name, style, bounds in (
    ('fixed', ':', clip.Fixed()(*data)),
    ('balanced', '--', clip.Balanced(target=TARGET)(*data)),
  ):
    ends = f'{float(bounds.low):.2f} .. {float(bounds.high):.2f}'
    for bound, label in ((bounds.low, f'{name}: {ends}'), (bounds.high, None)):
      axis.axvline(float(bound), color='black', ls=style, lw=1.2, label=label)
  axis.set(xscale='log', xlim=(0.25, 4.5), xlabel='ratio of new to old probability')
  axis.set_xticks([0.25, 0.5, 1, 2, 4], ['1/4', '1/2', '1', '2', '4'])
  axis.minorticks_off()
  axis.set(ylabel='advantage', title='Clip rule: bounds on one stale minibatch')
  axis.legend(loc='lower right', fontsize=8)


def draw_seats(axis: Axes) -> None:
  """Draws the seats of each batch, stacked by source."""
  source_SP = np.load(HISTORY)['source_SP']
  steps = np.arange(len(source_SP))
  base_S = np.zeros(len(steps))
  for i, colour in enumerate(('#0072B2', '#D55E00', '#009E73')):
    seats_S = (source_SP == i).sum(1)
    axis.bar(steps, seats_S, 1, base_S, color=colour, label=SOURCES[i])
    base_S = base_S + seats_S
  empty_S = source_SP.shape[1] - base_S
  axis.bar(steps, empty_S, 1, base_S, color='#BBBBBB', label='empty')
  axis.set(xlabel='learner step', ylabel='groups in the batch', xlim=(-0.5, steps[-1]))
  axis.set(title='Batch rule: seats of a short run, by source')
  axis.legend(loc='lower left', fontsize=8, ncol=2)


WITH_WORKDIR = {'batch': batch, 'record': record, 'smollm2': smollm2}
ALONE = {
  'history': history,
  'runs': runs,
  'trl': trl,
  'trl_run': trl_run,
  'picture': picture,
}


def main() -> None:
  """Makes the recording that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('name', choices=[*WITH_WORKDIR, *ALONE])
  parser.add_argument('--workdir', default='')
  args = parser.parse_args()
  if args.name in ALONE:
    ALONE[args.name]()
  elif args.workdir or args.name == 'record':
    WITH_WORKDIR[args.name](args.workdir)
  else:
    parser.error(f'{args.name} reads a run; give its --workdir')


if __name__ == '__main__':
  main()
