"""The first screen says what a checkpoint weighs."""

from runs import tiny

from bapo_jax.models import lora, transformer
from bapo_jax.run import welcome
from bapo_jax.training import remat, resolve


def sizes(**knobs):
  """(sizes by hand, parameters, numbers of adapters) of a tiny run."""
  config = tiny(**knobs)
  spec = resolve.open_model(config).spec
  few = lora.count(spec, config.lora.rank or 1, config.lora.targets)
  return (
    remat.checkpoint_sizes(config, spec),
    transformer.count(spec),
    few,
    (config, spec),
  )


def test_sizes_of_a_checkpoint_by_hand():
  found, weights, few, _ = sizes(**{'batch.rule': 'fresh_only'})
  assert found == {'weights': 4 * weights, 'optimiser': 8 * weights}
  found, *_ = sizes(**{'batch.rule': 'fresh_only', 'model.dtype': 'bfloat16'})
  assert found == {'weights': 2 * weights, 'optimiser': 12 * weights}
  lagged = {'batch.rule': 'fresh_only', 'rollout.weight_sync_interval': 2}
  assert sizes(**lagged)[0]['actor'] == 4 * weights
  found, _, few, _ = sizes(**lagged, **{'lora.rank': 2, 'model.dtype': 'bfloat16'})
  assert found == {'adapters': 4 * few, 'optimiser': 8 * few, 'actor': 4 * few}


def test_the_buffer_is_counted_where_a_rule_fills_it():
  # Two parts of 8 groups of 4 rows; 13 bytes per token of a row.
  found, *_, (config, _) = sizes(**{'batch.rule': 'adapted'})
  assert found['buffer'] == 2 * 8 * 4 * config.row_length * 13


def test_the_first_screen_names_them():
  *_, (config, spec) = sizes(**{'lora.rank': 2, 'checkpoint.keep': 3})
  line = welcome.disk(config, spec)
  assert 'MiB per checkpoint (adapters ' in line and '4 at most' in line
