"""Rows of metrics survive kills and resumes, and every number has a meaning."""

import json
import math
import sys
import types

import numpy as np
import pytest

from bapo_jax.runtime import metrics


def test_rows_come_back_as_written_and_each_line_is_json(tmp_path):
  with metrics.writing(tmp_path, -1) as write:
    write(1, {'loss/kl': float('nan'), 'loss/ratio_max': np.float32(np.inf)})
    write(2, {'loss/value': -math.inf, 'rollout/accuracy': np.float32(0.25)})
    # flushed line by line: a reader sees both before the writer closes
    one, two = metrics.read(tmp_path)
  assert one['step'] == 1 and math.isnan(one['loss/kl'])
  assert math.isnan(one['loss/ratio_max']) and math.isnan(two['loss/value'])
  assert two['step'] == 2 and two['rollout/accuracy'] == 0.25

  def refuse(constant):  # what Python reads but JSON does not know
    raise AssertionError(constant)

  for line in (tmp_path / 'metrics.jsonl').read_text().splitlines():
    row = json.loads(line, parse_constant=refuse)
    assert all(value is None or type(value) in (int, float) for value in row.values())


def test_resume_drops_what_will_be_written_again(tmp_path):
  with metrics.writing(tmp_path, -1) as write:
    for step in range(5):
      write(step, {'loss/value': step})
  with metrics.writing(tmp_path, 2) as write:
    write(3, {'loss/value': 30})
  values = [(row['step'], row['loss/value']) for row in metrics.read(tmp_path)]
  assert values == [(0, 0), (1, 1), (2, 2), (3, 30)]
  with metrics.writing(tmp_path, -1):
    pass  # a fresh start keeps nothing
  assert metrics.read(tmp_path) == []


@pytest.mark.parametrize(
  'tail', ['{"step": 2, "loss/va', '{"step": 2, "loss/\udcffkl": 2.0}', '[2]']
)
def test_a_damaged_last_line_is_dropped_and_an_earlier_one_an_error(tmp_path, tail):
  first, tail = (
    b'{"step": 1, "loss/value": 1.0}\n',
    tail.encode(errors='surrogateescape'),
  )
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(first + tail)
  assert metrics.read(tmp_path) == [{'step': 1, 'loss/value': 1.0}]
  with metrics.writing(tmp_path, 8) as write:
    write(9, {'loss/value': 9})  # must not be glued to the tail
  assert [row['step'] for row in metrics.read(tmp_path)] == [1, 9]
  path.write_bytes(first + tail + b'\n' + first)
  with pytest.raises(ValueError, match='line 2 of 3 is not a row of metrics'):
    metrics.read(tmp_path)


@pytest.mark.parametrize(
  'name', ['clip/shares', 'eval/aime/shares', 'eval/a/b/accuracy']
)
def test_an_unknown_name_is_refused(name, tmp_path):
  refusal = pytest.raises(ValueError, match=name)
  with refusal, metrics.writing(tmp_path, -1) as write:
    write(1, {'loss/value': 1.0, name: 0.4})
  assert metrics.read(tmp_path) == []


def test_tensorboard_gets_the_values_and_hides_the_redone_steps(tmp_path, caplog):
  event_pb2 = pytest.importorskip('tensorboardX.proto.event_pb2')

  with metrics.writing(tmp_path, 6, tensorboard=True) as write:
    write(7, {'clip/share': 0.5, 'loss/tv_reused': math.nan})
  assert not caplog.records  # of nan there is nothing to warn
  (file,) = (tmp_path / 'tensorboard').iterdir()
  data, events, i = file.read_bytes(), [], 0
  while i < len(data):  # a record: length, its checksum, the event, its checksum
    n = int.from_bytes(data[i : i + 8], 'little')
    events.append(event_pb2.Event.FromString(data[i + 12 : i + 12 + n]))
    i += n + 16
  # By START at 7 TensorBoard hides older events of step 7 and after.
  assert [e.step for e in events if e.HasField('session_log')] == [7]
  scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
  assert (7, 'clip/share', 0.5) in scalars
  assert any(tag == 'loss/tv_reused' and math.isnan(x) for _, tag, x in scalars)


def test_wandb_is_imported_only_on_demand(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)  # import wandb now fails
  with metrics.writing(tmp_path, -1) as write:
    write(1, {'loss/value': 1.0})
  refusal = pytest.raises(ValueError, match=r'pip install wandb, or set metrics\.wandb')
  with refusal, metrics.writing(tmp_path, -1, wandb=True):
    pass
  assert len(metrics.read(tmp_path)) == 1  # refused before a row was dropped

  logged, ids = [], []
  run = types.SimpleNamespace(
    log=lambda row, step: logged.append(row), finish=lambda: None
  )
  fake = types.SimpleNamespace(init=lambda **kw: ids.append(kw['id']) or run)
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  for step in (1, 2):
    with metrics.writing(tmp_path, step, wandb=True) as write:
      write(step, {'loss/value': 1.0})
  assert len(logged) == 2 and ids[0] == ids[1]  # a resumed run is the same run
