"""Leads names of knobs in TRL and verl, and names without their section, to our knobs.

The names are those of TRL's GRPOConfig and of verl's sections data, algorithm, trainer
and actor_rollout_ref. Of a dotted name, the longest known ending counts.
"""

import difflib
from collections.abc import Iterable, Iterator

GROUP, LIMIT = 'sampler.group_size', 'sampler.max_new_tokens'
PROMPTS = 'prompts.count, the number of prompts per learner step'
HIGH = "clip.fixed.high (1 + epsilon) with clip.rule='fixed'"
LOW = "clip.fixed.low (1 - epsilon) with clip.rule='fixed'"
BOTH = "clip.fixed.low and clip.fixed.high (1 -/+ epsilon) with clip.rule='fixed'"
DUAL = "clip.fixed.dual with clip.rule='fixed'"
KL = 'loss.kl, a cost on the divergence from the policy that sampled the batch'
PARTS = 'learner.minibatches, the number of minibatches per step'
MICRO = 'learner.grad_accum_steps, the number of micro-batches per minibatch'
STEPS = 'steps, the number of learner steps'
NARROW = "model.compute='bfloat16'"
RULE = 'advantage.rule'

# Foreign name -> our knob, which comes first, and how it differs.
KNOBS = {
  # optimiser
  **dict.fromkeys(('lr', 'learning_rate'), 'optimizer.lr'),
  **dict.fromkeys(('beta1', 'adam_beta1'), 'optimizer.b1'),
  **dict.fromkeys(('beta2', 'adam_beta2'), 'optimizer.b2'),
  **dict.fromkeys(('betas',), 'optimizer.b1 and optimizer.b2'),
  **dict.fromkeys(('max_grad_norm', 'grad_clip', 'clip_grad'), 'optimizer.max_norm'),
  **dict.fromkeys(
    ('warmup_steps', 'lr_warmup_steps', 'warmup_ratio', 'lr_warmup_steps_ratio'),
    'optimizer.warmup, in updates',
  ),
  # responses
  **dict.fromkeys(
    ('num_generations', 'n', 'n_samples_per_prompt', 'num_return_sequences'), GROUP
  ),
  **dict.fromkeys(('num_generations_eval', 'val_kwargs.n'), 'evaluate.group_size'),
  **dict.fromkeys(
    ('max_completion_length', 'max_response_length', 'response_length', 'max_tokens'),
    LIMIT,
  ),
  **dict.fromkeys(('max_prompt_length', 'prompt_length'), 'prompts.max_prompt_tokens'),
  **dict.fromkeys(('filter_overlong_prompts', 'truncation'), 'prompts.overlong'),
  'val_kwargs.temperature': 'evaluate.sampling.temperature',
  # sizes and updates of a step
  **dict.fromkeys(
    (
      *('per_device_train_batch_size', 'train_batch_size', 'generation_batch_size'),
      *('gen_batch_size', 'rollout_batch_size', 'batch_size'),
    ),
    PROMPTS,
  ),
  **dict.fromkeys(('num_iterations', 'ppo_epochs'), 'learner.epochs'),
  **dict.fromkeys(
    ('steps_per_generation', 'ppo_mini_batch_size', 'mini_batch_size'), PARTS
  ),
  **dict.fromkeys(
    (
      *('gradient_accumulation_steps', 'ppo_micro_batch_size', 'micro_batch_size'),
      'ppo_micro_batch_size_per_gpu',
    ),
    MICRO,
  ),
  **dict.fromkeys(
    (
      *('num_train_epochs', 'total_epochs', 'num_epochs'),
      *('max_steps', 'total_training_steps', 'total_steps'),
    ),
    STEPS,
  ),
  # clip and loss
  **dict.fromkeys(('epsilon_high', 'clip_ratio_high', 'clip_high', 'eps_high'), HIGH),
  **dict.fromkeys(('epsilon_low', 'clip_ratio_low', 'clip_low', 'eps_low'), LOW),
  **dict.fromkeys(
    ('epsilon', 'cliprange', 'clip_range', 'clip_ratio', 'clip_eps', 'eps_clip'), BOTH
  ),
  **dict.fromkeys(('delta', 'clip_ratio_c'), DUAL),
  **dict.fromkeys(
    ('off_policy_mask_threshold', 'opsm_delta', 'off_policy_sequence_mask_delta'),
    "mask.opsm.limit with mask.rule='opsm'",
  ),
  'm2_threshold': "mask.m2po.limit with mask.rule='m2po'",
  'dro_beta': "loss.kl with loss.rule='reinforce' and loss.kl_direction='squared'",
  **dict.fromkeys(('beta', 'kl_coef', 'kl_loss_coef', 'use_kl_loss'), KL),
  **dict.fromkeys(('kl_ctrl', 'use_kl_in_reward', 'init_kl_coef'), KL),
  **dict.fromkeys(('kl_penalty', 'kl_loss_type'), 'loss.kl_direction'),
  **dict.fromkeys(('loss_type', 'loss_mode'), 'loss.rule and loss.aggregate'),
  'loss_agg_mode': 'loss.aggregate',
  'importance_sampling_level': "loss.rule='sequence' with loss.aggregate='sequence'",
  **dict.fromkeys(
    ('tis_imp_ratio_cap', 'vllm_importance_sampling_cap'),
    "loss.decoupled.cap with loss.rule='decoupled'",
  ),
  **dict.fromkeys(('adv_estimator', 'advantage_estimator'), RULE),
  **dict.fromkeys(
    ('scale_rewards', 'norm_adv_by_std_in_grpo'),
    f"{RULE}: 'group_relative' divides by the standard deviation, 'group_centred' "
    'does not',
  ),
  **dict.fromkeys(
    ('filter_groups', 'dynamic_sampling', 'filter_groups.enable'),
    "batch.rule='learnable_only'",
  ),
  'max_num_gen_batches': "batch.max_extra_rounds with batch.rule='learnable_only'",
  # rewards
  **dict.fromkeys(
    (
      *('reward_funcs', 'reward_fn', 'reward_model', 'reward_manager'),
      *('custom_reward_function', 'reward_function'),
    ),
    'rewards.rule',
  ),
  'reward_weights': 'rewards.weights',
  'mask_truncated_completions': "rewards.shaping.truncated='masked'",
  'penalty_factor': 'rewards.shaping.overlong_penalty',
  **dict.fromkeys(('overlong_buffer', 'overlong_buffer.len'), 'rewards.shaping'),
  # evaluation, checkpoints, logs
  **dict.fromkeys(('eval_steps', 'test_freq', 'eval_freq'), 'evaluate.every'),
  **dict.fromkeys(('save_steps', 'save_freq', 'save_interval'), 'checkpoint.every'),
  **dict.fromkeys(('save_total_limit', 'max_actor_ckpt_to_keep'), 'checkpoint.keep'),
  **dict.fromkeys(('run_name', 'experiment_name', 'project_name'), 'title'),
  **dict.fromkeys(('report_to', 'logger'), 'metrics.tensorboard and metrics.wandb'),
  # model, data, devices
  **dict.fromkeys(('model_name_or_path', 'model_name'), 'model.path'),
  **dict.fromkeys(('dataset', 'dataset_name', 'train_files'), 'problems.source'),
  **dict.fromkeys(('eval_dataset', 'val_files'), 'problems.test_source'),
  **dict.fromkeys(('bf16', 'fp16', 'mixed_precision'), f'{NARROW} (and model.dtype)'),
  'torch_dtype': 'model.dtype and model.compute',
  **dict.fromkeys(
    ('gradient_checkpointing', 'enable_gradient_checkpointing'), 'model.remat'
  ),
  **dict.fromkeys(('attn_implementation', 'flash_attention'), 'model.attention'),
  **dict.fromkeys(('lora_r', 'lora_rank'), 'lora.rank'),
  'lora_alpha': 'lora.alpha',
  **dict.fromkeys(('target_modules', 'lora_target_modules'), 'lora.targets'),
  **dict.fromkeys(
    ('tensor_model_parallel_size', 'tensor_parallel_size', 'tp_size'), 'mesh.tensor'
  ),
  'fsdp_size': 'mesh.fsdp',
  **dict.fromkeys(('n_gpus_per_node', 'nnodes', 'num_processes'), 'mesh.data'),
}
WHOLE = 'training samples from the whole distribution; only evaluations truncate it, by'
ONE_REWARD = (
  'a response has one reward and no value function, so there is no discount; '
  f'{RULE} turns rewards into advantages'
)
REFERENCE = f'there is no reference model; use {KL}'
# Foreign name -> why there is no such knob, and what comes closest.
ABSENT = {
  **dict.fromkeys(
    ('entropy_coeff', 'entropy_coef', 'ent_coef', 'entropy_bonus'),
    'there is no entropy bonus; use loss.kl, or an own loss.rule',
  ),
  **dict.fromkeys(('gamma', 'lam', 'gae_lambda', 'cliprange_value'), ONE_REWARD),
  'top_p': f'{WHOLE} evaluate.sampling.top_p',
  'top_k': f'{WHOLE} evaluate.sampling.top_k',
  **dict.fromkeys(
    ('min_p', 'repetition_penalty'), f'{WHOLE} evaluate.sampling.top_p and top_k'
  ),
  **dict.fromkeys(('ref_model', 'sync_ref_model', 'ref'), REFERENCE),
  'lr_scheduler_type': 'the rate is constant after optimizer.warmup updates',
  'lora_dropout': 'adapters have no dropout; lora has rank, alpha and targets',
  'logging_steps': 'every step is in metrics.jsonl; evaluate.every sets evaluations',
  'use_vllm': 'sampling is built in; its knobs are in the section sampler',
  'gpu_memory_utilization': 'sampler.max_num_seqs sets the memory of the sampler',
  **dict.fromkeys(
    ('output_dir', 'default_local_dir'), 'give --workdir=..., the folder of a run'
  ),
}


def advice(name: str, known: Iterable[str]) -> str:
  """Returns what to use in place of an unknown knob, as the end of a sentence.

  Args:
    name: the unknown knob, dotted or not.
    known: the names of all knobs.
  """
  known = list(known)
  slot, own, _ = name.partition('.own.')
  has_own = any(x.startswith(f'{slot}.own.') for x in known)
  if own and f'{slot}.rule' in known and not has_own:
    return (
      f'set {slot}.rule to path/to/file.py:function, whose keyword arguments are its '
      'knobs'
    )
  for ending in _endings(name):
    if ending in KNOBS:
      return f'use {KNOBS[ending]}'
    if ending in ABSENT:
      return ABSENT[ending]
    ours = [x for x in known if x.endswith(f'.{ending}')]
    near = difflib.get_close_matches(name, ours, n=3, cutoff=0.0)
    if near:
      return f'did you mean {" or ".join(near)}?'
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
  return f'the nearest are {", ".join(near)}'


def _endings(name: str) -> Iterator[str]:
  """Yields the name, then the name without its first part, and so on."""
  parts = name.split('.')
  for i in range(len(parts)):
    yield '.'.join(parts[i:])
