"""Other rules on recorded tokens: by hand, compared with a run, and as a table."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recordings
from recordings import by

from bapo_jax.models import layers, transformer
from bapo_jax.run import step_record
from bapo_jax.training.config import Config
from lab import counterfactual
from lab.counterfactual import Applied, Recorded

NOTEBOOKS = pathlib.Path(__file__).parents[2] / 'notebooks'
RUNS, RUN = NOTEBOOKS / '4_runs', NOTEBOOKS / '5_run'
GRPO = {'clip.rule': 'fixed'}
WIDE = {'clip.rule': 'fixed', 'clip.high': 2.0, 'clip.low': 0.5}
BALANCED = {'clip.rule': 'balanced', 'clip.target': 0.4}


def response(reward, ratios, **changed):
  """A recorded response, whose tokens had the probability 1/2 when sampled."""
  old = [math.log(0.5)] * len(ratios)
  return {
    'reward': reward,
    'taught': True,
    'sampler_logp': old,
    'learner_logp': [o + math.log(r) for o, r in zip(old, ratios, strict=True)],
    'pieces': [*'abcdefgh'[: len(ratios)]],
  } | changed


def written(tmp_path, *groups):
  """The record of these groups."""
  (tmp_path / 'groups').mkdir()
  (tmp_path / 'config.json').write_text(json.dumps(Config().model_dump()))
  rows = ({'source': 'fresh', 'prompt': '1+1\n'} | group for group in groups)
  recordings.jsonl(tmp_path / 'groups' / '7.jsonl', rows)
  return counterfactual.read(str(tmp_path))


def recorded(tmp_path, *responses, **fields):
  """The record of one group."""
  return written(tmp_path, {'responses': responses} | fields)


def test_bounds_cut_what_they_say_and_leave_ratio_times_advantage(tmp_path):
  found = recorded(
    tmp_path, response(1.0, [1.0, 1.5, 2.5]), response(0.0, [0.7, 0.4, 1.0, 3.0])
  )
  assert found.step == 7 and found.logp_BT.shape == (2, 4)
  grpo = by(found, GRPO)
  # Advantages +1 and -1, seven tokens; above 1.2 and below .8 nothing is moved.
  assert grpo.adv_BT[:, 0] == pytest.approx([1, -1], abs=1e-4)
  expected = np.asarray([[1.0, 0, 0, 0], [0, 0, -1, -3]]) / 7
  assert grpo.weight_BT == pytest.approx(expected, abs=1e-4)
  assert grpo.cut_BT.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
  numbers = counterfactual.summary(found, grpo)
  assert numbers['share'] == pytest.approx(1 / 5, abs=1e-4)
  assert numbers['cut_positive'] == pytest.approx(2 / 3)
  assert numbers['cut_negative'] == 2 / 4


def test_the_tokens_that_one_rule_frees_are_named_far_ones_first(tmp_path):
  found = recorded(
    tmp_path, response(1.0, [1.0, 1.3, 1.9, 2.5]), response(0.0, [0.7, 0.4, 1.0])
  )
  grpo, wide = by(found, GRPO), by(found, WIDE)
  freed = list(counterfactual.moved_by(found, wide, grpo))
  assert [(t.before, t.text) for t in freed] == [('ab', 'c'), ('', 'a'), ('a', 'b')]
  assert [round(t.ratio, 2) for t in freed] == [1.9, 0.7, 1.3]
  assert [round(t.advantage) for t in freed] == [1, -1, 1]
  assert freed[0].probability == pytest.approx(0.5)
  assert not list(counterfactual.moved_by(found, grpo, wide))


def test_every_update_has_a_search_of_its_own(tmp_path):
  # update -> ratios of the right and of the wrong response, and the recorded bounds
  pairs = {
    4: ([1.0, 1.0], [1.0], 0.6, 1.2),  # 2 of 3: the start is enough
    2: ([1.0, 1.5], [1.0, 0.7, 1.0, 1.0], 0.6, 1.7),  # 1 of 4.7; 2.5 of 6.2 above 1.5
    9: ([1.0], [1.0] * 4, 0.9, 3.0),  # 1 of 5 wherever the bounds are
  }
  groups = [
    {
      'update': update,
      'responses': [response(1.0, a), response(0.0, b)],
      'low': low,
      'high': high,
    }
    for update, (a, b, low, high) in pairs.items()
  ]
  found = written(tmp_path, *groups)
  two, four, nine = counterfactual.searches(
    found, counterfactual.config_of(found, BALANCED)
  )
  assert [two.update, two.rows, two.tokens, two.stopped] == [2, 2, 6, 'between']
  assert two.start_share == pytest.approx(1 / 4.7, abs=1e-4)
  assert two.share == pytest.approx(2.5 / 6.2, abs=1e-4)
  assert (two.low, two.high) == (pytest.approx(0.6), pytest.approx(1.55))
  assert [four.update, four.tokens, four.stopped] == [4, 3, 'start']
  assert four.start_share == four.share == pytest.approx(2 / 3, abs=1e-4)
  assert [nine.update, nine.tokens, nine.stopped] == [9, 5, 'ends']
  assert nine.share == pytest.approx(1 / 5, abs=1e-4)
  # The advantages are those of whole groups, also where a row is looked at alone.
  alone = counterfactual.only(found, np.asarray([3]))
  assert by(alone, GRPO).adv_BT[:, 0] == pytest.approx([-1], abs=1e-4)
  fixed = counterfactual.searches(found, counterfactual.config_of(found, GRPO))
  assert [search.stopped for search in fixed] == ['', '', '']
  counts = counterfactual.summarise(str(tmp_path), ARMS, 'grpo')['searches']
  assert counts == {'start': 1, 'between': 1, 'ends': 1}


def test_advantages_have_the_weights_of_their_sources(tmp_path):
  pair = response(1.0, [1.0, 1.0]), response(0.0, [1.0, 1.0])
  found = recorded(tmp_path, *pair, source='reused')
  knobs = GRPO | {'batch.rule': 'adapted', 'batch.weights.reused': 0.25}
  other = by(found, knobs)
  # Advantages +1 and -1, a quarter of them; four tokens of ratio 1.
  assert other.adv_BT[:, 0] == pytest.approx([0.25, -0.25], abs=1e-4)
  expected = np.asarray([[0.25, 0.25], [-0.25, -0.25]]) / 4
  assert other.weight_BT == pytest.approx(expected, abs=1e-4)


def test_rows_that_were_not_computed_are_left_out(tmp_path):
  idle = response(0.0, [1.0], learner_logp=None)
  masked = response(0.0, [1.0], taught=False)
  found = recorded(tmp_path, idle, response(1.0, [1.0, 1.1]), masked)
  assert found.row_B.tolist() == [1] and found.reward_PG.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize('run', ['grpo', 'both'])
def test_the_rules_of_the_run_cut_what_the_run_cut(run):
  workdir = str(RUNS / run)
  found = counterfactual.read(workdir)
  groups = step_record.read(workdir, found.step)
  rows = [r for g in groups for r in g['responses'] if r['learner_logp']]
  ratios = np.concatenate([r['ratio'] for r in rows])
  cuts = np.concatenate([r['cut'] for r in rows]).astype(bool)
  lows = np.concatenate(
    [[g['low']] * len(r['cut']) for g in groups for r in g['responses'] if r['cut']]
  )
  own = counterfactual.apply(found, found.config)
  mask_BT = found.loss_mask_BT
  # Four decimals are recorded of log-probabilities and ratios.
  assert own.ratio_BT[mask_BT] == pytest.approx(ratios, rel=3e-4, abs=1e-4)
  if run == 'grpo':  # with a search every update had bounds of its own
    assert (own.cut_BT[mask_BT] == cuts).all() and set(lows) == {0.8}


# ------------------------------------------------- the change of entropy by a step

SPEC = transformer.ModelSpec(
  vocab=16, width=16, layers=2, heads=2, kv_heads=1, head_width=8, ffn=32
)
IDS = [([1, 2, 3], [4, 5, 6, 7]), ([8, 9], [10, 11])]
MASK_BT = np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], bool)


FIELDS = {'config': Config(), 'loss_mask_BT': MASK_BT, 'ids': IDS}
RECORD = Recorded(**dict.fromkeys(Recorded._fields) | FIELDS)


def applied(weight_BT):
  """A rule that gives these weights."""
  no_BT = np.zeros_like(weight_BT)
  weight_BT = np.where(MASK_BT, weight_BT, 0)
  return Applied(None, no_BT, np.zeros(2), weight_BT, no_BT, no_BT)


@jax.jit
def logprobs(params):
  """Log-probabilities [N, V] before each recorded token, without any padding."""
  rows = []
  for prompt, ids in IDS:
    hidden_TD = layers.forward(params, jnp.asarray([[*prompt, *ids]]), SPEC)[0]
    logp_TV = jax.nn.log_softmax(hidden_TD @ transformer.head(params).T)
    rows.append(logp_TV[len(prompt) - 1 : -1])
  return jnp.concatenate(rows)


def entropy(params):
  logp_NV = np.asarray(logprobs(params), np.float64)
  return -(np.exp(logp_NV) * logp_NV).sum(1).mean()


def objective(params, weight_N):
  """sum(weight * log-probability) of the recorded tokens."""
  tokens_N = np.concatenate([ids for _, ids in IDS])
  return (logprobs(params)[np.arange(len(tokens_N)), tokens_N] * weight_N).sum()


def test_what_is_measured_is_the_entropy_after_a_step_along_the_gradient():
  params = transformer.init(SPEC, jax.random.key(0))
  params = jax.tree.map(lambda x: 2 * x, params)
  weight_BT = np.random.default_rng(1).normal(size=MASK_BT.shape).astype(np.float32)
  step, rules = 3e-6, {'one': applied(weight_BT), 'half': applied(weight_BT / 2)}
  change = counterfactual.entropy_changes(RECORD, rules, (SPEC, params), step)
  gradient = jax.grad(objective)(params, jnp.asarray(weight_BT[MASK_BT]))
  length, norm = (
    sum(float((x**2).sum()) for x in jax.tree.leaves(tree)) ** 0.5
    for tree in (params, gradient)
  )
  after = jax.tree.map(lambda x, g: x + step * length / norm * g, params, gradient)
  expected = entropy(after) - entropy(params)
  (predicted, measured), (half, _) = change['one'], change['half']
  # An entropy of two nats in float32 has an error of some 1e-6.
  assert measured == pytest.approx(expected, abs=5e-6) and abs(expected) > 3e-4
  # The derivative is the limit of the difference, and half the weights give half.
  assert predicted == pytest.approx(expected, rel=0.03)
  assert half == pytest.approx(predicted / 2, rel=1e-4)


def test_rescored_rows_have_the_log_probabilities_of_the_model():
  params = transformer.init(SPEC, jax.random.key(2))
  found = counterfactual.rescored(RECORD, (SPEC, params))
  expected = np.asarray(logprobs(params))[np.arange(6), [4, 5, 6, 7, 10, 11]]
  assert found.logp_BT[MASK_BT] == pytest.approx(expected, abs=1e-5)
  assert (found.logp_BT[~MASK_BT] == 0).all()


def test_the_cosine_is_that_of_gradients_with_respect_to_the_parameters():
  params = transformer.init(SPEC, jax.random.key(3))
  one_BT, other_BT = np.random.default_rng(4).normal(size=(2, *MASK_BT.shape))
  rules = {'one': one_BT, 'twice': 2 * one_BT, 'less': -other_BT}
  found = counterfactual.cosines(
    RECORD, {k: applied(x.astype(np.float32)) for k, x in rules.items()}, (SPEC, params)
  )
  a, b = (
    np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])
    for gradient in (
      jax.grad(objective)(params, jnp.asarray(x[MASK_BT])) for x in (one_BT, other_BT)
    )
  )
  cosine = a @ b / np.sqrt((a @ a) * (b @ b))
  assert abs(cosine) < 0.9
  expected = [[1, 1, -cosine], [1, 1, -cosine], [-cosine, -cosine, 1]]
  assert found == pytest.approx(np.asarray(expected), abs=1e-4)


# ------------------------------------------- recorded batches of a page of papers/

ARMS = {
  'grpo': {'clip.rule': 'fixed', 'clip.low': 0.8, 'clip.high': 1.2},
  'widest': {'clip.rule': 'fixed', 'clip.low': 0.9, 'clip.high': 3.0},
}


def test_tokens_inside_all_bounds_are_counted_from_the_record():
  found = counterfactual.summarise(str(RUN), ARMS, 'grpo')
  (path,) = (RUN / 'groups').glob('*.jsonl')
  inside = tokens = 0
  for line in path.read_text().splitlines():
    for response in json.loads(line)['responses']:
      if response['learner_logp']:
        tokens += response['tokens']
        inside += sum(0.9 < ratio < 1.2 for ratio in response['ratio'])
  assert found['tokens'] == tokens
  assert found['inside'] == pytest.approx(inside / tokens, abs=2e-3)
  # A higher upper bound frees tokens with A > 0, a higher lower one cuts others.
  grpo, widest = found['arms']['grpo'], found['arms']['widest']
  assert widest['cut_positive'] < grpo['cut_positive']
  assert widest['cut_negative'] > grpo['cut_negative']
  # Where the policy is the one that sampled no ratio is cut, and all are inside.
  staler = found['staler']
  assert staler['0']['inside'] == 1 and staler['0']['cut_negative'] == 0
  assert staler['1'] == grpo and staler['8']['inside'] < found['inside'] < 1


def test_the_part_of_an_advantage_that_is_not_of_the_response_stays(tmp_path):
  # GRPO gives +1 and -1; the recorded advantages of the first response have .5 more on
  # its first token. Without the division by the deviation, .5, that is .5 + .5.
  found = recorded(
    tmp_path,
    response(1.0, [1.0, 1.0], advantages=[1.5, 1.0]),
    response(0.0, [1.0, 1.0], advantages=None),
  )
  for knobs, first in (({}, 1.0), ({'advantage.rule': 'group_centred'}, 0.5)):
    adv_BT = by(found, GRPO | knobs).adv_BT
    expected = [[first + 0.5, first], [-first, -first]]
    assert adv_BT == pytest.approx(np.asarray(expected), abs=1e-4)
