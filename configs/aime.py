r"""RL with verifiable rewards on problems whose answers are integers in \boxed{}.

  python -m bapo_jax.main --config=configs/aime.py --workdir=runs/tiny
  python -m bapo_jax.main --config=configs/aime.py --config.clip.rule=fixed

`tiny` (the default): the made problems of bapo_jax/data/synthetic.py and a policy of
0.1 M parameters (Qwen2 architecture), which gets a supervised warm start. It takes
minutes on two CPU cores; LOG.md has the held-out accuracy at temperature 1.

`:recipe` is `tiny` with the clip rule of Balanced PO's public code: the lower bound
moves first, contributions are those of the surrogate, the target is positive /
negative, and the loss has a dual clip.

`:7b` and `:32b` are Balanced PO on Skywork-OR1 with DeepSeek-R1-Distill-Qwen-7B and
-32B (arXiv:2510.18927, section 5: lr 2e-6, temperature 0.6, no KL term; from its public
script: 16 responses per prompt, minibatches of 64 prompts). Evaluation is avg@16 on
AIME 2024 and 2025. They need an accelerator pod, and

  --config.model.path       a directory with config.json, *.safetensors, tokenizer.json
  --config.problems.source  the math rows of Skywork-OR1-RL-Data, parquet or jsonl
  --config.problems.test_source   AIME 2024 and 2025: a.jsonl,b.jsonl

We have run neither yet. The paper reports 70.8 / 62.5 (7B) and 87.1 / 80.0 (32B) on
AIME 2024 / 2025. Responses end at 8192 tokens here; the paper's longer runs are
--config.sampler.max_new_tokens=32768 and 65536.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = 'tiny') -> ConfigDict:
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


def tiny() -> ConfigDict:
  return base.get_config()


def recipe() -> ConfigDict:
  """`tiny` with the clip rule, loss and bound search of Balanced PO's public code."""
  config = tiny()
  config.title = 'trial, tiny, clip of the public recipe'
  config.clip.rule = 'recipe'
  config.loss.clipped.limit = 20.0
  config.learner.bounds_scope = 'micro_batch'
  return config


def published() -> ConfigDict:
  """The knobs that the paper's runs share."""
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


def seven() -> ConfigDict:
  return distilled('DeepSeek-R1-Distill-Qwen-7B', tensor=4)


def thirty_two() -> ConfigDict:
  return distilled('DeepSeek-R1-Distill-Qwen-32B', tensor=8)


def distilled(name: str, tensor: int) -> ConfigDict:
  """A published run of one model."""
  config = published()
  config.title = f'AIME, {name}'
  config.model.path = f'models/{name}'
  config.mesh.update(data=1, fsdp=-1, tensor=tensor)
  return config
