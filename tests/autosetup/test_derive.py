"""What a run decides by itself: by which fact, with which reason, and only once."""

import json
import pathlib
import re
import types

import foreign
import jax
import pytest
import recordings
from refusals import refused, sentence_of
from runs import plain

from bapo_jax import main, sharding
from bapo_jax.autosetup import derive, derive_sizes, derive_text, facts, knob_lists
from bapo_jax.autosetup.facts import Facts, Verified
from bapo_jax.data.row import Row
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.methods import METHODS
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.run import experiment
from bapo_jax.training import budget
from bapo_jax.training.config import parse

ROOT = pathlib.Path(__file__).parents[2]
FINETUNE = 'configs/finetune.py'
THREE = ('model.path', 'problems.source', 'problems.test_source')
SUMS = [Row(row['problem'], row['answer']) for row in foreign.problems(80)]
# Of Qwen2.5-1.5B, whose weights the papers' smallest model has.
BIG = ModelSpec(
  vocab=151936, width=1536, layers=28, heads=12, kv_heads=2, head_width=128, ffn=8960
)
SMALL = ModelSpec(
  vocab=1000, width=64, layers=2, heads=4, kv_heads=2, head_width=16, ffn=128
)


CHAT, BASE = (
  Tokenizer(types.SimpleNamespace(chat_template=x), (0,), '') for x in ('x', '')
)


def three(*paths: str, **overrides: object) -> list[str]:
  """The three knobs of the command line, and others."""
  given = dict(zip(THREE, paths, strict=False)) | overrides
  return [f'--config.{name}={value}' for name, value in given.items()]


def asked(**overrides: object):
  """The config of configs/finetune.py before anything is derived."""
  return main.read_config(FINETUNE, three('m', 'a.jsonl', 'b.jsonl', **overrides))


def device(platform: str):
  return types.SimpleNamespace(platform=platform)


def known(**changes) -> Facts:
  """The facts of a small chat model on one CPU."""
  found = Facts(
    spec=SMALL,
    tokenizer=CHAT,
    data=Data(SUMS[:60], SUMS[60:]),
    split=lambda: (SUMS[:60], SUMS[60:]),
    lengths=lambda template: ([len(template)] * 60, [len(template)] * 20),
    verified=lambda rule: Verified(80, 80),
    devices=jax.devices()[:1],
    memory=2**34,
  )
  return found._replace(**changes)


def values(config=None, **changes) -> dict:
  """knob -> value, as derived from these facts."""
  _, found = derive.derive(config or asked(), known(**changes))
  return {each.knob: each.value for each in found}


@pytest.mark.parametrize(
  ('answers', 'rule'),
  [
    (['0', '7', '999'], 'aime'),
    (['0', '7', '1000'], 'gsm8k'),
    (['-3', '1,000', '5/2'], 'gsm8k'),
    (['5', r'\frac{\pi}{2}'], 'math'),
    (['x^2 + 1', '(3, 4)'], 'math'),
    (['{"numbers": [3, 5], "target": 8}'], 'countdown'),
    (['yes', 'no'], 'exact'),
  ],
)
def test_the_verifier_is_the_narrowest_that_reads_all_answers(answers, rule):
  assert derive_text.by_answers(answers)[0] == rule


def test_a_small_model_is_not_asked_for_a_box_and_a_large_one_is():
  small, large = values(), values(spec=BIG)
  assert small['rewards.rule'] == 'gsm8k' and large['rewards.rule'] == 'aime'
  assert small['tokenizer.template'] == 'chat:{problem}'
  assert r'\boxed{}' in large['tokenizer.template']
  boxed = [row._replace(problem=row.problem + r' Use \boxed{}.') for row in SUMS]
  found = values(split=lambda: (boxed, boxed[:1]))
  assert found['rewards.rule'] == 'aime', 'the problems ask for it'
  assert found['tokenizer.template'] == 'chat:{problem}', 'and once is enough'


def test_rows_that_name_a_verifier_decide_and_a_base_model_has_a_plain_template():
  named = [row._replace(verifier='math') for row in SUMS]
  found = values(split=lambda: (named, named[:1]))
  assert found['rewards.rule'] == 'math'
  assert values(tokenizer=BASE)['tokenizer.template'] == '{problem}\n'


def test_prompts_are_as_long_as_the_longest_unless_one_is_out_of_all_proportion():
  def length(training, held_out):
    facts_ = known(lengths=lambda template: (training, held_out))
    config = asked(**{'tokenizer.template': '{problem}'})
    return derive_text.prompt_tokens(config, facts_)

  usual = [10] * 300
  assert length(usual, [20])[0] == 20
  # The 99th percentile is 10: longer ones than 20 are left out, and counted.
  found, reason = length([*usual, 900], [10])
  assert found == 20
  assert '1 of 301 training prompts are longer, up to 900 tokens' in reason
  assert length(usual, [900])[0] == 900, 'held-out problems are never left out'


def test_prompts_over_the_limit_are_not_counted():
  config = asked(**{'prompts.max_prompt_tokens': 20, 'tokenizer.template': '{problem}'})

  def found(fitting):
    lengths = [10] * fitting + [900] * 80, [10] * 20
    derived = values(config, lengths=lambda template: lengths)
    return derived['prompts.count'], derived['steps']

  assert (found(160), found(5)) == ((8, 20), (4, 10))


def test_responses_fit_the_positions_and_the_kind():
  def tokens(rule, spec=SMALL, platform='tpu', prompt=10):
    config = asked(**{'rewards.rule': rule, 'prompts.max_prompt_tokens': prompt})
    facts_ = known(spec=spec, devices=[device(platform)])
    return derive_text.response_tokens(config, facts_)[0]

  assert tokens('math') == 8192
  assert tokens('math', platform='cpu') == 512
  assert tokens('gsm8k') == 48  # 5 x len('{problem}'), in steps of 16
  assert tokens('math', prompt=32_000) == 32_768 - 32_000


@pytest.mark.parametrize(
  ('parameters', 'rate'),
  [(7.6e9, 1e-6), (1.5e9, 1e-6), (0.5e9, 3e-6), (1.35e8, 1.1e-5)],
)
def test_the_learning_rate_is_the_papers_and_grows_as_the_model_shrinks(
  parameters, rate, monkeypatch
):
  monkeypatch.setattr(Facts, 'parameters', property(lambda _: parameters))
  for config, times in ((asked(), 1), (asked(**{'lora.rank': 4}), 10)):
    found, _ = derive_sizes.learning_rate(config, known())
    assert found == pytest.approx(times * rate)


@pytest.mark.parametrize(
  ('gib', 'prompt', 'response'),
  [(200, None, None), (64, None, None), (40, None, None), (40, 4000, 1000)],
)
def test_a_run_takes_what_memory_there_is_and_no_more(gib, prompt, response):
  facts_ = known(spec=BIG, memory=gib * 2**30)
  lengths = {'prompts.max_prompt_tokens': prompt, 'sampler.max_new_tokens': response}
  config, _ = derive.derive(asked(**lengths), facts_)
  schedule = derive_sizes.schedule_of(config, facts_)
  assert schedule.remat == config.model.remat, 'a later start decides the same'
  mesh = sharding.make(devices=facts_.devices)
  spec = derive_sizes.spec_of(config, facts_)
  found = budget.count(budget.sizes_of(config, spec), spec, schedule, mesh)
  assert found.update <= gib * 2**30


def test_less_memory_means_fewer_slots_and_more_micro_batches():
  long = asked(**{'sampler.max_new_tokens': 8192, 'prompts.max_prompt_tokens': 128})

  def sizes(gib):
    found = values(long, spec=BIG, memory=gib * 2**30)
    return found['sampler.max_num_seqs'], found['learner.grad_accum_steps']

  (most, fewest), (less, more) = sizes(600), sizes(48)
  assert less < most == 64 and more > fewest, '64 responses a step'
  # Nothing fits, and a reason says so.
  _, derived = derive.derive(asked(), known(spec=BIG, memory=2**32))
  unfit = [x.knob for x in derived if 'NOTHING FITS' in x.reason]
  assert unfit == ['learner.grad_accum_steps']


def test_weights_go_over_all_devices_where_one_has_no_room():
  eight = jax.devices()
  assert len(eight) == 8
  found = values(spec=BIG, devices=eight, memory=2**34)
  assert (found['mesh.fsdp'], found['mesh.data']) == (-1, 1)
  found = values(devices=eight)
  assert (found['mesh.fsdp'], found['mesh.data']) == (1, -1)
  config, _ = derive.derive(asked(), known(devices=eight))
  mesh = sharding.make(**config.mesh.model_dump(), devices=eight)
  assert not config.minibatch_rows % sharding.row_shards(mesh)


def test_a_knob_is_judged_once_it_is_derived():
  config = asked(**{'prompts.count': 4})  # the default would be 8 minibatches
  decided, _ = derive.derive(config, known())
  assert decided.learner.minibatches == 4 and parse(decided.model_dump())
  assert '4 groups do not divide into learner' in sentence_of(
    asked, **{'prompts.count': 4, 'learner.minibatches': 3}
  )


def test_an_override_wins_and_the_screen_has_the_others():
  config = asked(**{'optimizer.lr': 0.5, 'rewards.rule': 'exact'})
  decided, found = derive.derive(config, known())
  assert decided.optimizer.lr == 0.5 and decided.rewards.rule == 'exact'
  lines = derive.screen(decided, found)
  assert 'optimizer.lr' not in lines and 'rewards.rule' not in lines
  assert 'nothing added for exact' in lines, 'what follows sees the override'


@pytest.fixture
def begun(tmp_path, one_device):
  """A model of others and problems; returns (config with open knobs, workdir)."""
  path = foreign.model(tmp_path / 'model', 'qwen3')
  training = recordings.jsonl(tmp_path / 'a.jsonl', foreign.problems(24))
  held_out = recordings.jsonl(tmp_path / 'b.jsonl', foreign.problems(6, 24))
  given = three(path, training, held_out, steps=1)
  return main.read_config(FINETUNE, given), str(tmp_path / 'work')


def test_a_run_that_has_begun_continues_with_its_derived_knobs(
  begun, tmp_path, capsys, monkeypatch
):
  asked_for, work = begun
  config = derive.decide(asked_for, work)
  assert config.tokenizer.template == 'chat:{problem}'
  experiment.claim(work, config, asked_for)
  stored = json.loads((tmp_path / 'work' / 'config.json').read_text())
  assert stored['steps'] == 1 and stored['optimizer']['lr'] is None, 'as it was given'
  (tmp_path / 'work' / 'metrics.jsonl').write_text('')
  capsys.readouterr()
  recordings.jsonl(tmp_path / 'a.jsonl', foreign.problems(24, 100))
  monkeypatch.setattr(facts, 'gather', lambda *args: pytest.fail('derived again'))
  assert derive.decide(asked_for, work) == config
  assert config.model.attention is None, 'of the machine of the next start'
  assert 'Derived when this run began' in capsys.readouterr().out


@pytest.mark.parametrize('mode', ['check', 'plan'])
def test_the_run_of_a_workdir_that_is_not_named_decides_nothing(
  mode, begun, tmp_path, monkeypatch
):
  def derived(*args):
    raise ValueError('derived from model, problems and machine')

  asked_for, _ = begun
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(derive, 'derive', derived)
  monkeypatch.setattr(main, 'PLANNING', {})
  work = tmp_path / 'runs/default'  # has a run, of which nothing can be read
  work.mkdir(parents=True)
  (work / 'metrics.jsonl').write_text('')
  (work / 'config.json').write_text('no JSON')
  paths = asked_for.model.path, *(f'{tmp_path}/{name}.jsonl' for name in 'ab')
  flags = [mode, f'--config={ROOT / FINETUNE}', *three(*paths, steps=1)]
  assert 'derived from model, problems and machine' in sentence_of(
    main.main, main.parse(['bapo_jax', *flags])
  )
  named = refused([*flags, '--workdir=runs/default'])
  assert 'runs/default/config.json' in named


def test_what_is_yours_is_asked_for():
  assert 'give --config.model.path=..., --config' in sentence_of(
    main.read_config, FINETUNE, []
  )


# ------ the first screen and the report show the rules in force and every changed knob


def shown(**knobs):
  """The lines of the first screen."""
  config = parse(plain(**knobs))
  return knob_lists.lines(config, config)


@pytest.mark.parametrize(
  ('knobs', 'warning'),
  [
    ({'clip.rule': 'fixed', 'clip.low': 0.2}, 'clip.low=0.2 .* is 0.8 for an epsilon'),
    (
      {'clip.low': (0.2, 0.3)},
      r'clip.low=\(0.2, 0.3\) .* is 0.8 for an epsilon of 0.2',
    ),
    ({'clip.low': (0.5, 0.9)}, ''),
    ({'clip.rule': 'dcpo', 'clip.low': 0.16}, ''),  # an epsilon
    *((method.overrides, '') for method in METHODS.values()),
  ],
)
def test_the_first_screen_warns_of_an_epsilon_in_place_of_a_bound(knobs, warning):
  lines = ' '.join(shown(**knobs).split())
  assert re.search(f' warning {warning}', lines) if warning else 'warning' not in lines


def test_the_first_screen_lists_changed_knobs_and_those_without_an_effect():
  knobs = {'lora.alpha': 8.0, 'steps': 3, 'tokenizer.template': 'x{problem}'}
  lines = shown(**knobs)
  *_, changed, idle = lines.splitlines()
  assert changed == (
    "  changed    steps=3, lora.alpha=8.0, tokenizer.template='x{problem}'"
  )
  assert idle == '  no effect  lora.alpha=8.0 (lora.rank=0)'
  switched = shown(**knobs, **{'lora.rank': 2})
  assert 'no effect' not in switched and 'lora.rank=2' in switched
  assert 'changed' not in shown()
