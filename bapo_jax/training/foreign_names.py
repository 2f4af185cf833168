"""Maps names of knobs in TRL and verl, and names without their section, to our knobs.

The names are those of TRL's GRPOConfig and of verl's sections data, algorithm, trainer
and actor_rollout_ref. A dotted name is matched by its longest known ending.
"""

import difflib
from collections.abc import Iterable

FIXED = "with clip.rule='fixed'"
# Our knob, which comes first, and how it differs -> foreign names.
_OURS = {
  # optimiser
  'optimizer.lr': 'lr learning_rate',
  'optimizer.b1': 'beta1 adam_beta1',
  'optimizer.b2': 'beta2 adam_beta2',
  'optimizer.b1 and optimizer.b2': 'betas',
  'optimizer.schedule': (
    'lr_scheduler_type lr_scheduler lr_schedule schedule scheduler warmup_style'
  ),
  'optimizer.floor, a share of the rate': 'lr_scheduler_kwargs min_lr_ratio',
  'optimizer.rule': 'optim optimizer_type optimizer_name',
  'optimizer.max_norm': 'max_grad_norm grad_clip clip_grad',
  'optimizer.warmup, in updates': (
    'warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio'
  ),
  # responses
  'sampler.group_size': ('num_generations n n_samples_per_prompt num_return_sequences'),
  'evaluate.group_size': 'num_generations_eval val_kwargs.n',
  'sampler.max_new_tokens': (
    'max_completion_length max_response_length response_length max_tokens'
  ),
  'prompts.max_prompt_tokens': 'max_prompt_length prompt_length',
  'prompts.overlong': 'filter_overlong_prompts truncation',
  'evaluate.sampling.temperature': 'val_kwargs.temperature',
  "sampler.actor_dtype, 'int8' or 'float8_e4m3fn'": 'quantization',
  'rollout.environment, a function that answers turns': (
    'tools environment_factory env_class tool_config_path interaction_config_path'
  ),
  'rollout.max_turns': 'max_tool_calling_iterations max_assistant_turns max_user_turns',
  # sizes and updates of a step
  'prompts.count, the number of prompts per learner step': (
    'per_device_train_batch_size train_batch_size generation_batch_size gen_batch_size '
    'rollout_batch_size batch_size'
  ),
  'learner.epochs': 'num_iterations ppo_epochs',
  'learner.minibatches, the number of minibatches per step': (
    'steps_per_generation ppo_mini_batch_size mini_batch_size'
  ),
  'learner.grad_accum_steps, the number of micro-batches per minibatch': (
    'gradient_accumulation_steps ppo_micro_batch_size micro_batch_size '
    'ppo_micro_batch_size_per_gpu'
  ),
  'steps, the number of learner steps': (
    'num_train_epochs total_epochs num_epochs max_steps total_training_steps '
    'total_steps'
  ),
  # clip and loss
  f'clip.high (1 + epsilon) {FIXED}': (
    'epsilon_high clip_ratio_high clip_high eps_high'
  ),
  f'clip.low (1 - epsilon) {FIXED}': ('epsilon_low clip_ratio_low clip_low eps_low'),
  f'clip.low and clip.high (1 -/+ epsilon) {FIXED}': (
    'epsilon cliprange clip_range clip_ratio clip_eps eps_clip'
  ),
  f'clip.dual {FIXED}': 'delta clip_ratio_c',
  "mask.limit with mask.rule='opsm'": (
    'off_policy_mask_threshold opsm_delta off_policy_sequence_mask_delta'
  ),
  "mask.limit with mask.rule='m2po'": 'm2_threshold',
  "loss.kl with loss.rule='reinforce' and loss.kl_direction='squared'": 'dro_beta',
  'loss.reference, a cost on the divergence from the first weights, or loss.kl, a cost '
  'on the divergence from the policy that sampled the batch': (
    'beta kl_coef kl_loss_coef use_kl_loss kl_ctrl init_kl_coef'
  ),
  'loss.entropy': (
    'entropy_coeff entropy_coef ent_coef entropy_bonus entropy entropy_loss'
  ),
  'teacher.path, or loss.reference alone for the first weights': (
    'ref_model ref sync_ref_model teacher_model teacher_model_name_or_path'
  ),
  'loss.reference_estimator, or loss.kl_direction': (
    'kl_penalty kl_loss_type use_kl_in_reward use_bias_correction_kl'
  ),
  "loss.aggregate ('sequence' for grpo, 'token' for dapo and bnpo, 'constant' for "
  'dr_grpo), or name a method: --config=FILE:dr_grpo, :gspo, :cispo, :sapo or :vespo': (
    'loss_type'
  ),
  'a method, such as --config=FILE:gspo, :gmpo (geo_mean), :cispo, :sapo, :dppo_tv or '
  ':dppo_kl, or loss.rule': 'loss_mode',
  "loss.aggregate: 'token' for token-mean, 'sequence' for seq-mean-token-mean, and "
  "'constant', up to a factor, for seq-mean-token-sum and seq-mean-token-sum-norm": (
    'loss_agg_mode'
  ),
  "loss.rule='sequence' with loss.aggregate='sequence'": 'importance_sampling_level',
  "loss.cap with loss.rule='decoupled'": (
    'tis_imp_ratio_cap vllm_importance_sampling_cap '
    'vllm_importance_sampling_correction vllm_importance_sampling_mode'
  ),
  "advantage.rule: 'group_relative' for grpo, 'leave_one_out' for rloo; there is no "
  'gae, which needs a value function': 'adv_estimator advantage_estimator',
  "advantage.rule: 'group_relative' divides by the standard deviation, 'group_centred' "
  'does not': 'scale_rewards norm_adv_by_std_in_grpo',
  "batch.rule='learnable_only'": 'filter_groups dynamic_sampling filter_groups.enable',
  "batch.max_extra_rounds with batch.rule='learnable_only'": 'max_num_gen_batches',
  # rewards
  'rewards.rule': (
    'reward_funcs reward_fn reward_model reward_manager custom_reward_function '
    'reward_function'
  ),
  'rewards.weights': 'reward_weights',
  "rewards.shaping.truncated='masked'": 'mask_truncated_completions',
  'rewards.shaping.overlong_penalty': 'penalty_factor',
  'rewards.shaping': 'overlong_buffer overlong_buffer.len',
  # evaluation, checkpoints, logs
  'evaluate.every': 'eval_steps test_freq eval_freq',
  'checkpoint.every': 'save_steps save_freq save_interval',
  'checkpoint.keep': 'save_total_limit max_actor_ckpt_to_keep',
  'title': 'run_name experiment_name project_name',
  'metrics.tensorboard and metrics.wandb': 'report_to logger',
  # model, data, devices
  'model.path': 'model_name_or_path model_name',
  'problems.source': 'dataset dataset_name train_files',
  'problems.test_source': 'eval_dataset val_files',
  "model.compute='bfloat16' (and model.dtype)": 'bf16 fp16 mixed_precision',
  'model.dtype and model.compute': 'torch_dtype',
  'model.remat': 'gradient_checkpointing enable_gradient_checkpointing',
  'model.attention': 'attn_implementation flash_attention',
  'lora.rank': 'lora_r lora_rank',
  'lora.alpha': 'lora_alpha',
  'lora.targets': 'target_modules lora_target_modules',
  'mesh.tensor': (
    'tensor_model_parallel_size tensor_parallel_size tp_size vllm_tensor_parallel_size'
  ),
  'mesh.fsdp': 'fsdp_size',
  'mesh.data, mesh.fsdp and mesh.tensor to divide the devices; all attached ones are '
  'used': 'n_gpus_per_node',
  'mesh.data for devices, and --processes, a flag of bapo train, for machines': (
    'nnodes num_processes'
  ),
}
WHOLE = 'training samples from the whole distribution; only evaluations truncate it, by'
# Why there is no such knob, and what comes closest -> foreign names.
_NONE = {
  'a response has one reward and no value function, so there is no discount; '
  'advantage.rule turns rewards into advantages': (
    'gamma lam gae_lambda cliprange_value'
  ),
  f'{WHOLE} evaluate.sampling.top_p': 'top_p',
  f'{WHOLE} evaluate.sampling.top_k': 'top_k',
  f'{WHOLE} evaluate.sampling.top_p and top_k': 'min_p repetition_penalty',
  'adapters have no dropout; lora has rank, alpha and targets': 'lora_dropout',
  'every step is in metrics.jsonl; evaluate.every sets evaluations': 'logging_steps',
  'sampling is built in; its knobs are in the section sampler': (
    'use_vllm vllm_mode rollout.name'
  ),
  'sampler.max_num_seqs sets the memory of the sampler': (
    'gpu_memory_utilization vllm_gpu_memory_utilization'
  ),
  'give --workdir=..., the folder of a run': 'output_dir default_local_dir',
}
KNOBS, ABSENT = (
  {name: ours for ours, names in table.items() for name in names.split()}
  for table in (_OURS, _NONE)
)


def translated(name: str, known: Iterable[str]) -> str:
  """Returns the advice for a foreign name, or for a knob's name without its section.

  Returns '' for any other name.
  """
  parts = name.split('.')
  for i in range(len(parts)):
    ending = '.'.join(parts[i:])
    if ending in KNOBS:
      return f'use {KNOBS[ending]}'
    if ending in ABSENT:
      return ABSENT[ending]
    ours = [x for x in known if x.endswith(f'.{ending}')]
    if near := difflib.get_close_matches(name, ours, n=3, cutoff=0.0):
      return f'did you mean {" or ".join(near)}?'
  return ''
