"""Three problems, a tiny random policy, and its sampler."""

import jax
import making

from bapo_jax.data import prompts, tokenizer
from bapo_jax.data.row import Row
from bapo_jax.models import decoder, transformer
from bapo_jax.rollout import rollout
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.rollout.knobs import RolloutConfig
from bapo_jax.rollout.partial_rollouts import PartialRollouts
from bapo_jax.runtime.progress import PhaseTimer

TOKENIZER = tokenizer.load(tokenizer.EMBEDDED, '{problem}\n')
SPEC = transformer.ModelSpec(
  vocab=25, width=16, layers=1, heads=2, kv_heads=1, head_width=8, ffn=16
)
PARAMS = making.params(SPEC)
ACTOR = decoder.actor(PARAMS, SPEC)
PROBLEMS = ['1+1=', '2+30=', '7=']
WIDTH, NEW, GROUP = 6, 7, 4
ENGINE = RolloutEngine(
  SPEC,
  max_prompt_tokens=WIDTH,
  max_new_tokens=NEW,
  group_size=GROUP,
  temperature=1.0,
  eos=TOKENIZER.eos,
  max_num_seqs=4,
  prefill_batch_size=4,
  tokens_per_dispatch=NEW,
)


def problems() -> prompts.Problems:
  rows = [Row(p, a) for p, a in zip(PROBLEMS, ['2', '32', '7'], strict=True)]
  return prompts.tabulate(TOKENIZER, rows, WIDTH, drop=False)


def sample(
  ids,
  verifier,
  *,
  actor=ACTOR,
  engine=ENGINE,
  rollouts=None,
  step=0,
  policy_version=None,
  first_uid=0,
  shape=lambda groups, formatted_B: groups,
  **knobs,
) -> rollout.Rollout:
  """Samples the problems with these ids, by the weights of `step` unless given."""
  return rollout.rollout(
    rollouts or PartialRollouts(engine, len(ids)),
    actor,
    prompts.prompts_by_id(problems(), ids),
    jax.random.key(0),
    verification=rollout.Verification(
      problems(), TOKENIZER, verifier, PhaseTimer(), shape
    ),
    step=step,
    policy_version=step if policy_version is None else policy_version,
    first_uid=first_uid,
    k=RolloutConfig(**knobs),
  )
