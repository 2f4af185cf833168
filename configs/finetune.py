r"""A model and problems of your own: three knobs, and the run decides the others.

  .venv/bin/python -m bapo_jax.main --config=configs/finetune.py --workdir=runs/mine \
    --config.model.path=M --config.problems.source=train.jsonl \
    --config.problems.test_source=test.jsonl

A knob that is None here is derived from model, problems and machine when the run
begins, printed with its reason, and stored in resolved.json (autosetup/derive.py);
--config.<knob>=... sets it instead. The clip rule is Balanced PO's, the batch rule
takes fresh groups; docs/reference/algorithms.md lists the others. See also
docs/guide/your_model.md.
"""

from ml_collections import ConfigDict

from bapo_jax.training.config import auto, defaults

YOURS = ('model.path', 'problems.source', 'problems.test_source')


def get_config() -> ConfigDict:
  """All knobs; None where the run derives them, or you give them."""
  config = defaults()
  config.title = 'fine-tuning'
  # Balanced PO, section 5. At 1.0 small models ramble: of SmolLM2-135M's sums .025 are
  # right, at 0.6 .100 (log/2026-11-22.md).
  config.sampler.temperature = 0.6
  config.evaluate.sampling.temperature = 0.6
  config.problems.overlap = 'drop'
  config.optimizer.warmup = 0
  config.checkpoint.every = 25
  config.checkpoint.keep = 1
  with config.unlocked():
    config.update_from_flattened_dict(dict.fromkeys((*YOURS, *auto())))
  return config
