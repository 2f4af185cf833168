r"""RL with verifiable rewards on problems whose answers are integers in \boxed{}.

  .venv/bin/python -m bapo_jax.main --config=configs/aime.py --workdir=runs/tiny
  .venv/bin/python -m bapo_jax.main --config=configs/aime.py --workdir=runs/tiny_fixed \
    --config.clip.rule=fixed

`tiny` (the default): made problems (bapo_jax/data/synthetic.py) and a policy of
0.1 M parameters (Qwen2 architecture), which is part of the package. It takes
minutes on two CPU cores; log/ has the held-out accuracy at temperature 1.

`:recipe` is `tiny` with the clip rule of Balanced PO's public code: the lower bound
moves first, contributions are those of the surrogate, the target is positive /
negative, and the loss has a dual clip.

`:balanced_paper` and `:batch_paper` are the settings of the two papers, all that they
give, each value with its source beside it. What they leave open has our value, and is
named: Balanced PO gives no batch size, group size, epochs, KL term or warm-up (they are
those of its public script), no steps and no limit on prompts; Batch Adaptation PO no
epochs, temperature, response length, weight decay or limit on reuse.

`:7b` and `:32b` are `:balanced_paper` on Skywork-OR1 with DeepSeek-R1-Distill-Qwen-7B
and -32B on a mesh of their own. Evaluation is avg@16 on AIME 2024 and 2025. All four
need an accelerator pod, and

  --config.model.path       a directory with config.json, *.safetensors, tokenizer.json
  --config.problems.source  the math rows of Skywork-OR1-RL-Data, parquet or jsonl
  --config.problems.test_source   aime24=a.jsonl,aime25=b.jsonl: a number for each year

We have run none of them yet. Balanced PO reports 70.8 / 62.5 (7B) and 87.1 / 80.0 (32B)
on AIME 2024 / 2025. Responses end at 8192 tokens here; its longer runs are
--config.sampler.max_new_tokens=32768 and 65536.
"""

from ml_collections import ConfigDict

from bapo_jax.training.config import defaults


def get_config(arg: str = 'tiny') -> ConfigDict:
  """Returns the config of a variant."""
  return VARIANTS[arg]()


def tiny() -> ConfigDict:
  return defaults()


def recipe() -> ConfigDict:
  """`tiny` with the clip rule, loss and bound search of Balanced PO's public code."""
  config = tiny()
  config.title = 'trial, tiny, clip of the public recipe'
  config.clip.rule = 'recipe'
  config.loss.limit = 20.0
  config.learner.bounds_scope = 'micro_batch'
  return config


def large(name: str) -> ConfigDict:
  """A run of this model on a pod; neither paper gives these values, all are ours."""
  config = defaults()
  config.title = f'AIME, {name}'
  config.model.path = f'models/{name}'
  config.model.compute = 'bfloat16'
  config.tokenizer.template = (
    'chat:{problem}\nPlease reason step by step, and put your final answer within '
    '\\boxed{}.'
  )
  config.problems.source = 'data/skywork_or1_math.jsonl'
  # As in the papers' tables, each year has an accuracy of its own.
  config.problems.test_source = 'aime24=data/aime24.jsonl,aime25=data/aime25.jsonl'
  config.prompts.max_prompt_tokens = 1024
  config.sampler.update(
    max_new_tokens=8192,
    max_num_seqs=512,
    prefill_batch_size=32,
    tokens_per_dispatch=128,
    cache_segments=8,
    done_check_lag=1,
  )
  config.learner.grad_accum_steps = 16
  config.optimizer.update(warmup=0, b2=0.999)
  config.evaluate.update(every=20, group_size=16)
  config.evaluate.sampling.temperature = 0.6
  config.mesh.update(data=1, fsdp=-1)
  config.steps = 400
  return config


def balanced_paper(name: str = 'DeepSeek-R1-Distill-Qwen-7B') -> ConfigDict:
  """Balanced PO's own settings (arXiv:2510.18927); "script": its public script.

  Three sets of values were published. Those of the paper are here: a target of 0.4 as a
  share, [0.6, 0.9] and [1.2, 3]. The script has 0.5 as a ratio, [0.8, 0.95] and [1.2,
  2] (`:recipe`), the authors' README 0.5, [0.6, 0.9] and [1.2, 3].

  The script fills only what the paper leaves open. So its search, its lr of 1e-6, its
  temperature of 1 and its dual clip of 3 are not here: the paper's objective clips no
  token with A < 0 above the bounds.
  """
  config = large(name)
  config.title += ", Balanced PO's settings"
  config.clip.rule = 'balanced'
  config.clip.update(
    target=0.4,  # rho_0, section 5
    low=(0.6, 0.9),  # [a-, b-], section 5
    high=(1.2, 3.0),  # [a+, b+], section 5
    high_step=0.05,  # delta_1, section 5
    low_step=0.02,  # delta_2, section 5
    contribution='gradient',  # the terms of Eq. 5
    order='upper',  # Algorithm 1: the upper bound moves first
    resolution='step',  # Algorithm 1: steps of delta_1 and delta_2
  )
  config.batch.rule = 'fresh_only'  # GRPO's batch, section 5
  config.advantage.rule = 'group_relative'  # GRPO's advantage, section 5
  config.optimizer.lr = 2e-6  # section 5
  config.sampler.temperature = 0.6  # section 5
  config.sampler.max_new_tokens = 8192  # preliminary runs; 32k in Fig. 11, 64k main
  config.prompts.count = 256  # script
  config.learner.minibatches = 4  # script: minibatches of 64 prompts
  config.sampler.group_size = 16  # script: n
  config.learner.epochs = 2  # script
  config.loss.kl = 0.0  # script: no KL term
  config.optimizer.weight_decay = 0.1  # script
  # script: lr_warmup_steps_ratio=0.1, of our number of steps
  updates = config.learner.minibatches * config.learner.epochs
  config.optimizer.warmup = config.steps // 10 * updates
  return config


def batch_paper() -> ConfigDict:
  """Batch Adaptation PO's own settings (arXiv:2602.20722, its table of settings)."""
  config = large('DeepSeek-R1-Distill-Qwen-1.5B')  # one of its models
  config.title += ", Batch Adaptation PO's settings"
  config.batch.rule = 'adapted'  # Definition 3.1
  config.advantage.rule = 'group_relative'  # (r - mean) / sqrt(var + eps), section 3
  config.sampler.group_size = 8  # G, settings
  config.prompts.count = 256  # settings
  config.learner.minibatches = 4  # settings: minibatches of 64 prompts
  config.rollout.weight_sync_interval = 5  # v, settings
  config.buffer.reeval_interval = 5  # m, settings
  config.buffer.reevaluate = 128  # settings: at most 128 problems are re-evaluated
  # paper: as many hard problems as a batch has prompts, and a batch of reusable groups
  config.buffer.capacity = 256
  config.buffer.hard_order = 'fifo'  # section 3: a FIFO of hard problems
  config.buffer.max_off_policy_steps = 3  # section 3: reused at an age of 1 to 3 steps
  config.buffer.thresholds.rule = 'fixed'  # settings; 'moving' is Eq. 8
  config.buffer.thresholds.update(
    hard=1 / 8,  # c1, settings
    reusable=(1 / 8, 5 / 8),  # c2 and c3, settings
  )
  config.optimizer.lr = 1e-6  # settings
  config.clip.rule = 'fixed'  # settings: epsilon = 0.2 on both sides
  config.clip.update(low=0.8, high=1.2)
  config.loss.kl = 0.001  # settings: .001 to .01, by task; older scripts: .001 for math
  config.loss.kl_direction = 'policy_behavior'  # KL(pi || alpha), its objective
  config.loss.entropy = 0.001  # the authors' script
  return config


def seven() -> ConfigDict:
  """The 7B for 64 devices: weights over all of them, so that nothing is summed.

  One row of a device at a time leaves the memory for `model.remat=dots`.
  """
  return distilled('DeepSeek-R1-Distill-Qwen-7B', 1, grad_accum_steps=16, slots=2048)


def thirty_two() -> ConfigDict:
  """The 32B for 64 devices; the actor of one with tensor=1 would need 61 GiB."""
  return distilled('DeepSeek-R1-Distill-Qwen-32B', 4, grad_accum_steps=64, slots=512)


def distilled(name: str, tensor: int, grad_accum_steps: int, slots: int) -> ConfigDict:
  """Balanced PO's settings for one model, on a mesh that holds it."""
  config = balanced_paper(name)
  config.title = f'AIME, {name}'
  config.mesh.tensor = tensor
  config.learner.grad_accum_steps = grad_accum_steps
  config.sampler.update(max_num_seqs=slots, prefill_batch_size=64)
  return config


VARIANTS = {
  'tiny': tiny,
  'recipe': recipe,
  'balanced_paper': balanced_paper,
  'batch_paper': batch_paper,
  '7b': seven,
  '32b': thirty_two,
}
