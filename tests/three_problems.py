"""Three problems, a tiny random policy, and its sampler."""

import making

from bapo_jax.data import prompts, tokenizer
from bapo_jax.data.row import Row
from bapo_jax.models import decoder, transformer
from bapo_jax.rollout.engine import RolloutEngine

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
