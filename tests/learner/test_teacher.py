"""A frozen teacher: exact gradients over all responses, and whole runs."""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import making
import numpy as np
import optax
import pytest
import runs
from making import SPEC
from refusals import refusal, sentence_of
from runs import last_run, tiny

from bapo_jax.algorithms import clip, loss
from bapo_jax.learner import learner, scoring
from bapo_jax.learner import objective as objective_lib
from bapo_jax.models import layers, transformer
from bapo_jax.runtime.progress import PhaseTimer
from bapo_jax.training import budget, build, inputs, refusals, trainer
from bapo_jax.training.config import Config
from bapo_jax.types import Groups

V, HEAT, FRESH = SPEC.vocab, 0.8, jnp.zeros(1, jnp.int32)


def every_response(length: int) -> Groups:
  """Returns one group: all V^length responses to a prompt of one token."""
  responses = np.asarray([*itertools.product(range(V), repeat=length)])
  tokens_GT = np.pad(responses, ((0, 0), (1, 0)), constant_values=3)
  groups = making.groups([0], [1], [0], len(tokens_GT), length + 1)
  mask_PGT = jnp.broadcast_to(jnp.arange(length + 1) > 0, (1, *tokens_GT.shape))
  return groups._replace(
    tokens_PGT=jnp.asarray(tokens_GT[None]), response_mask_PGT=mask_PGT
  )


@pytest.fixture(scope='module')
def params():
  return making.params()


@pytest.fixture(scope='module')
def others():
  """Returns the weights of the teacher."""
  return making.params(seed=1)


def score(params, groups):
  knobs = dict(rows=groups.tokens_PGT.shape[1], spec=SPEC, temperature=HEAT)
  return scoring.score(params, groups, **knobs)


def distributions(params, prefix_NT):
  """Returns log pi [N, V] of the token after each prefix."""
  hidden_ND = layers.forward(params, prefix_NT, SPEC)[:, -1]
  return jax.nn.log_softmax(hidden_ND @ transformer.head(params).T / HEAT)


def token_kl(params, others, prefix_NT):
  """Returns KL(pi || p) [N] of the token after each prefix."""
  logp_NV, logq_NV = (distributions(x, prefix_NT) for x in (params, others))
  return (jnp.exp(logp_NV) * (logp_NV - logq_NV)).sum(1)


def gradient(params, batch):
  """Returns the gradient of the unclipped loss, a sum over rows by their mean."""
  knobs = dict(pack=False, aggregate='constant', temperature=HEAT)
  chosen = making.objective(clip.Unclipped(), **knobs)
  return objective_lib.gradient(params, batch, chosen)[1]


def close_gradients(found, wanted):
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  for x, y in pairs:
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted)) > 1e-2


@pytest.mark.parametrize('length', [1, 2])
def test_distillation_is_the_gradient_of_the_exact_divergence(length, params, others):
  # All responses, each with its probability, on-policy. A token has the divergence at
  # its own prefix: that of the next token alone, in sum over the prefixes of pi.
  groups = every_response(length)
  logp_PGT = score(params, groups)
  groups = groups._replace(behavior_logp_PGT=logp_PGT)
  teacher = dict(reference_PGT=score(others, groups), teacher=1.0)
  batch = learner.flatten(groups, FRESH, None, **teacher)
  chance_B = jnp.exp(logp_PGT.sum(2)[0])
  np.testing.assert_allclose(chance_B.sum(), 1, rtol=1e-5)
  rows = len(chance_B)
  batch = batch._replace(adv_BT=batch.adv_BT * rows * chance_B[:, None])

  def exact(params):
    total = 0.0
    for n in range(length):
      prefixes = every_response(n).tokens_PGT[0] if n else jnp.full((1, 1), 3)
      chance_N = jnp.ones(1)
      if n:
        chance_N = jnp.exp(score(params, every_response(n)).sum(2)[0])
      kl_N = token_kl(params, others, prefixes)
      total += (jax.lax.stop_gradient(chance_N) * kl_N).sum()
    return total

  assert exact(params) > 0.1
  close_gradients(gradient(params, batch), jax.grad(exact)(params))


@pytest.mark.parametrize(
  ('rule', 'loss_rule', 'estimator'),
  [
    ('unclipped', 'clipped', 'k3'),
    ('balanced', 'clipped', 'weighted'),
    ('balanced', 'sequence', 'weighted'),
    ('unclipped', 'clipped', 'k2'),
  ],
)
def test_the_reference_adds_its_penalty_and_leaves_the_bounds(
  rule, loss_rule, estimator, params, others
):
  # Eq. 7 of arXiv:2512.02556, with the token's ratio under a rule of responses too, and
  # Eq. 4 of arXiv:2402.03300: per token, in the mean over all tokens.
  batch = making.off_policy(params, SPEC, 4, 8, 6, HEAT)
  batch = batch._replace(adv_BT=batch.adv_BT.at[:8].set(0))  # rows to compute as well
  old_BT, mask_BT = batch.behavior_logp_BT, batch.loss_mask_BT
  groups = making.groups(range(4), [1, 2, 3, 2], [0] * 4, 8, 6)
  groups = groups._replace(response_mask_PGT=mask_BT.reshape(4, 8, 6))
  batch = batch._replace(reference_BT=score(others, groups).reshape(old_BT.shape))

  def penalty(params):
    logp_BT = score(params, groups).reshape(old_BT.shape)
    quotient_BT = jnp.exp(batch.reference_BT) / jnp.exp(logp_BT)
    k3_BT = quotient_BT - jnp.log(quotient_BT) - 1
    cost_BT = {
      'weighted': jnp.exp(logp_BT) / jnp.exp(old_BT) * k3_BT,
      'k3': k3_BT,
      'k2': jnp.log(quotient_BT) ** 2 / 2,
    }[estimator]
    return 0.3 * jnp.where(mask_BT, cost_BT, 0).sum() / mask_BT.sum()

  rules = dict(clip_rule=clip.ClipRule.rules.names[rule](), temperature=HEAT)
  rules |= dict(loss_rule=loss_rule, reference_estimator=estimator)
  with_it, without = (
    objective_lib.gradient(params, batch, making.objective(**rules, reference=b))
    for b in (0.3, 0.0)
  )
  making.close(with_it[0] - without[0], penalty(params), count=192, terms=4)
  close_gradients(
    jax.tree.map(jnp.subtract, with_it[1], without[1]), jax.grad(penalty)(params)
  )
  for x, y in zip(with_it[2][1][:7], without[2][1][:7], strict=True):
    np.testing.assert_array_equal(x, y)


IN_REWARD = {'loss.reference': 0.3, 'loss.reference_estimator': 'k1_reward'}


def test_a_reference_in_the_reward_has_the_gradient_of_the_exact_divergence():
  # Five responses of one token, each weighted by the probability with which the policy
  # samples it. Rewards are equal, so all of the advantage is the cost.
  rng = np.random.default_rng(0)
  z_V, ref_V = jnp.float32(rng.normal(0, 1.5, (2, 5)))
  ref_V = jax.nn.log_softmax(ref_V)
  logmu_V = jax.nn.log_softmax(z_V)
  groups = making.groups([0], [0], [0], 5, 1)
  groups = groups._replace(behavior_logp_PGT=logmu_V[None, :, None])
  knobs = tiny(**IN_REWARD).credit | {'reference_PGT': ref_V[None, :, None]}
  adv_V = learner.advantages(groups, FRESH, **knobs)[0, :, 0]

  def gained(z_V):  # E_mu[r A], the objective without a clip
    r_V = jnp.exp(jax.nn.log_softmax(z_V) - logmu_V)
    return (jnp.exp(logmu_V) * r_V * adv_V).sum()

  def exact(z_V):
    logp_V = jax.nn.log_softmax(z_V)
    return -0.3 * (jnp.exp(logp_V) * (logp_V - ref_V)).sum()

  wanted_V = jax.grad(exact)(z_V)
  assert jnp.abs(wanted_V).max() > 0.02
  np.testing.assert_allclose(jax.grad(gained)(z_V), wanted_V, atol=1e-6)


def test_a_reference_in_the_reward_is_no_penalty_and_adds_to_a_teacher(params):
  batch = making.off_policy(params, SPEC, 4, 8, 6, HEAT)
  batch = batch._replace(reference_BT=batch.behavior_logp_BT + 0.1)
  loss_of = {
    estimator: gradient_value(params, batch, estimator)
    for estimator in ('k1_reward', 'weighted')
  }
  assert loss_of['k1_reward'] == gradient_value(params, batch, 'k3', reference=0.0)
  assert loss_of['weighted'] != loss_of['k1_reward']
  assert tiny(**IN_REWARD).credit['teacher'] == 0.3
  both = tiny(**IN_REWARD | {'teacher.path': 'a', 'teacher.weight': 0.5})
  assert both.credit['teacher'] == 0.8
  other = tiny(**IN_REWARD | {'loss.reference_estimator': 'k3'})
  assert other.credit['teacher'] == 0


def gradient_value(params, batch, estimator, reference=0.3):
  """Returns the loss with this penalty, all rows computed."""
  knobs = dict(reference=reference, reference_estimator=estimator, pack=False)
  chosen = making.objective(clip.Unclipped(), temperature=HEAT, **knobs)
  return objective_lib.gradient(params, batch, chosen)[0]


@pytest.fixture(scope='module')
def llama(tmp_path_factory) -> str:
  """Returns the directory of a tiny model with the tokenizer of the policy."""
  return runs.source(tmp_path_factory.mktemp('teacher') / 'llama')


def model(path: pathlib.Path, **changed) -> str:
  """Returns the directory of a tiny model with these values in its config.json."""
  directory = runs.source(path)
  values = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps(values | changed))
  return directory


def judge(config: Config) -> None:
  """Raises what is wrong with a config and its files."""
  refusals.judge(refusals.of_inputs(config, inputs.read(config)))


judged = functools.partial(sentence_of, judge)


def test_a_teacher_that_cannot_score_the_policys_tokens_is_refused(tmp_path, llama):
  judge(tiny(**{'teacher.path': llama}))
  other = pathlib.Path(runs.source(tmp_path / 'other'))
  text = (other / 'tokenizer.json').read_text()
  (other / 'tokenizer.json').write_text(text.replace('"7"', '"A"'))
  sentence = judged(tiny(**{'teacher.path': str(other)}))
  assert sentence.startswith(f'teacher.path={other} has another tokenizer than the pol')
  brief = model(tmp_path / 'brief', max_position_embeddings=20)
  assert 'has 20 positions, fewer than' in judged(tiny(**{'teacher.path': brief}))
  assert 'teacher.path' in judged(tiny(**{'teacher.path': str(tmp_path / 'none')}))


def test_a_teacher_with_fewer_embedding_rows_than_the_policy_is_refused(tmp_path):
  # A row for every token of the tokenizer, but not for the padding of the policy's
  # embedding, which the policy can sample as well.
  policy = inputs.open_model(tiny())
  rows = len(policy.tokenizer.backend)
  assert rows < policy.spec.vocab
  few = model(tmp_path / 'few', vocab_size=rows)
  sentence = judged(tiny(**{'teacher.path': few}))
  assert sentence.startswith(f'teacher.path={few} has {rows} tokens')
  assert f'can sample {policy.spec.vocab}' in sentence


@pytest.mark.parametrize(
  ('knobs', 'words'),
  [
    ({'teacher.weight': 0.0}, 'has no effect on advantages with teacher.weight=0'),
    (
      {'teacher.weight': 0.0, 'teacher.reward': False, 'loss.reference': 0.1},
      'keep teacher.reward=True and set loss.reference',
    ),
    (
      {'teacher.reward': False, 'batch.rule': 'learnable_only'},
      "batch.rule='learnable_only' drops groups with one verdict",
    ),
  ],
)
def test_a_teacher_without_an_effect_is_refused(knobs, words):
  assert words in refusal(**{'teacher.path': 'a'} | knobs)


def test_a_budget_counts_the_teacher(llama):
  n = transformer.count(inputs.teacher_spec(tiny(**{'teacher.path': llama})))
  spec = inputs.open_model(tiny()).spec
  few = transformer.count(spec)
  for knobs, expected in (
    ({}, 0),
    ({'teacher.path': llama}, 2 * n),  # in bfloat16
    ({'teacher.path': llama, 'loss.reference': 0.1}, 2 * n),
    ({'loss.reference': 0.1}, 4 * few),  # a copy of the policy
    ({'loss.reference': 0.1, 'lora.rank': 2}, 0),  # the frozen weights are there
  ):
    sizes = budget.sizes_of(tiny(**knobs), spec)
    assert budget.teacher_bytes(sizes, spec) == expected


# A step with every part: advantages of a teacher and of the reward, and the penalty.
BOTH = {'loss.reference': 0.1, 'checkpoint.every': 1, 'evaluate.every': 9}


@pytest.mark.parametrize('own', [True, False])
def test_a_run_with_a_teacher_is_resumed_to_the_bit(own, llama, tmp_path):
  knobs = {'teacher.path': llama, 'teacher.weight': 0.5}
  if own:  # rewards of steps, which differ from the first step on
    knobs = {'rewards.rule': f'{runs.MY}:halves', 'optimizer.lr': 1e-2}
  knobs |= BOTH
  whole, broken = (tmp_path / name for name in ('whole', 'broken'))
  for workdir, steps in ((whole, 2), (broken, 1), (broken, 2)):
    assert runs.train(tiny(**knobs, steps=steps), workdir) == 0
  one, two = last_run(whole), last_run(broken)
  # Both ends of the broken run are evaluated.
  assert one.rows[2] == two.rows[2] and runs.same(one.arrays, two.arrays)
  assert {'teacher/kl', 'loss/reference'} < set(one.rows[2])
  assert float(one.rows[2]['loss/reference']) > 0
  recorded = (whole / 'groups' / '2.jsonl').read_text().splitlines()
  by_token = [r['advantages'] for x in recorded for r in json.loads(x)['responses']]
  assert any(by_token)


def test_eight_devices_make_the_step_of_one(llama):
  knobs = BOTH | {'teacher.path': llama, 'optimizer.lr': 1e-2}
  mesh = {'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2}
  states = []
  for n, layout in ((1, {}), (8, mesh)):
    with runs.on_devices(n):
      start = build.start(tiny(**knobs | layout), PhaseTimer())
      s, row, _ = next(trainer.train_loop(*start))
      states.append((jax.device_get(s.params), row))
      start[0].verifier.close()
  (one, row), (eight, other) = states
  assert row['teacher/kl'] == pytest.approx(other['teacher/kl'], rel=1e-4) != 0
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize('rule', loss.LossRule.rules.names)
def test_what_a_message_holds_reaches_neither_weights_nor_metrics(rule, params):
  """Tokens that nobody sampled lie between sampled ones, as a message does."""
  batch = making.off_policy(params, SPEC, 4, 8, 7, HEAT)
  batch = batch._replace(
    loss_mask_BT=batch.loss_mask_BT & (jnp.arange(7) != 4)[None],
    reference_BT=batch.behavior_logp_BT + 0.1,
  )
  objective = making.objective(clip.Balanced(), rule, reference=0.1, kl=0.1)
  step = jax.jit(
    functools.partial(learner.learn, tx=(tx := optax.sgd(0.1)), objective=objective)
  )

  def learned(garbage):
    def spoiled(x_BT):
      return jnp.where(batch.loss_mask_BT, x_BT, garbage)

    names = ('behavior_logp_BT', 'prox_BT', 'reference_BT')
    spoilt = {name: spoiled(getattr(batch, name)) for name in names}
    new, _, metrics, _ = step(params, tx.init(params), batch._replace(**spoilt))
    assert not metrics['learner/skipped']
    return new, metrics

  wanted = learned(0.0)
  for garbage in (1e9, jnp.nan):
    jax.tree.map(np.testing.assert_array_equal, learned(garbage), wanted)


def test_a_rule_may_return_anything_outside_responses():
  def rule(groups):
    return jnp.where(groups.response_mask_PGT, 1.0, jnp.nan)

  rule.reads = 'groups'
  groups = making.groups([0], [1], [0], 4, 6)
  holes = groups.response_mask_PGT & (jnp.arange(6) != 3)[None, None]
  groups = groups._replace(response_mask_PGT=holes)
  batch = learner.flatten(groups, FRESH, rule)
  np.testing.assert_array_equal(batch.adv_BT, np.float32(holes[0]))
