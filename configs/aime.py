r"""Off-policy RL with verifiable rewards; answers are integers in 0..999, \boxed{}.

  python -m bapo_jax.main --config=configs/aime.py [--config.clip.rule=fixed ...]

`tiny` (no argument): the embedded problems of bapo_jax/data/synthetic.py and a
Qwen2-architecture policy of 0.1 M parameters that gets a supervised warm start.
Two CPU cores, minutes; held-out accuracy at temperature 1: see LOG.md.

`:recipe` is `tiny` with the clip rule of Balanced PO's public code: lower bound first,
surrogate contributions, target as positive to negative, dual clip in the loss.

`:7b` and `:32b`: Balanced PO on Skywork-OR1 with DeepSeek-R1-Distill-Qwen-7B and -32B
(arXiv:2510.18927, section 5: lr 2e-6, temperature 0.6, no KL term; from its public
script: 16 responses, minibatches of 64 prompts). Evaluation is avg@16 on AIME 2024
and 2025. They need

  --config.model.path       a directory with the weights (config.json, *.safetensors,
                            tokenizer.json)
  --config.problems.source  the math rows of Skywork-OR1-RL-Data, parquet or jsonl
  --config.problems.test_source   AIME 2024 and 2025: a.jsonl,b.jsonl

and a pod: we have run neither yet. The paper reports 70.8 / 62.5 (7B) and
87.1 / 80.0 (32B) on AIME 2024 / 2025. Responses are cut at 8k tokens; the longer
runs of the paper are --config.sampler.max_new_tokens=32768 and 65536.
"""

from configs import base


def get_config(arg: str = 'tiny'):
  """The config of one variant.

  Raises:
    ValueError: no such variant.
  """
  variants = {'tiny': tiny, 'recipe': recipe, '7b': seven, '32b': thirty_two}
  arg = arg or 'tiny'
  if arg not in variants:
    raise ValueError(
      f'configs/aime.py has no variant {arg!r}; choose one of {sorted(variants)}'
    )
  return variants[arg]()


def tiny():
  return base.get_config()


def recipe():
  """`tiny` with the clip, loss and search of Balanced PO's public code."""
  config = tiny()
  config.title = 'trial, tiny, clip of the public recipe'
  config.clip.rule = 'recipe'
  config.loss.clipped.limit = 20.0
  config.learner.bounds_scope = 'micro_batch'
  return config


def published():
  """What the paper's runs have in common."""
  config = base.get_config()
  config.model.compute = 'bfloat16'
  config.logprobs.chunk = 512
  config.tokenizer.template = (
    'chat:{problem}\nPlease reason step by step, and put your final answer within '
    '\\boxed{}.'
  )
  config.problems.source = 'data/skywork_or1_math.jsonl'
  config.problems.test_source = 'data/aime24_25.jsonl'
  config.prompts.update(count=256, max_prompt_tokens=1024)
  config.sampler.update(
    group_size=16,
    max_new_tokens=8192,
    temperature=0.6,
    max_num_seqs=512,
    prefill_batch_size=32,
    tokens_per_dispatch=128,
    cache_segments=8,
    done_check_lag=1,
  )
  config.learner.update(epochs=2, minibatches=4, grad_accum_steps=16)
  config.optimizer.update(lr=2e-6, warmup=0, b2=0.999, weight_decay=0.1)
  config.evaluate.update(every=20, group_size=16)
  config.evaluate.sampling.temperature = 0.6
  config.clip.balanced.target = 0.4
  config.steps = 400
  return config


def seven():
  return distilled('DeepSeek-R1-Distill-Qwen-7B', tensor=4)


def thirty_two():
  return distilled('DeepSeek-R1-Distill-Qwen-32B', tensor=8)


def distilled(name: str, tensor: int):
  """A published run of one model."""
  config = published()
  config.title = f'AIME, {name}'
  config.model.path = config.tokenizer.path = f'models/{name}'
  config.mesh.update(data=1, fsdp=-1, tensor=tensor)
  return config
