"""What hangs on the loop and what the step may leave out: evaluation, spikes, figures, dumps, traces, host memory."""

import struct
import time
from itertools import islice

import jax
import numpy as np
import optax
import pytest

import maxtext
from maxtext.data.dataloader import make_dataloader
from maxtext.data.options import data_options
from maxtext.mesh.chips import CHIPS, find_chip
from maxtext.models.flops import train_flops_per_token
from maxtext.observe.metric_writers import TensorBoardWriter
from maxtext.optim.options import schedule_options
from maxtext.optim.schedules import learning_rate
from maxtext.optim.spikes import skip_spikes
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.evaluate import Evaluate
from maxtext.training.loop import run_loop
from tests.support import History, losses, program, tiny


@pytest.mark.slow
def test_evaluation_is_the_loss_on_other_data(tmp_path):
  history = History()
  config = tiny(steps=6, eval_interval=3, eval_steps=2, learning_rate=1e-3, z_loss_multiplier=0.1, run_name="evaluated",
                base_output_directory=str(tmp_path))  # fmt: skip
  state = maxtext.train(config, callbacks=[history])
  assert [i + 1 for i, f in enumerate(history.figures) if "eval_loss" in f] == [3, 6]
  p = program(config, devices=8)
  batches, trained = jax.device_get(
    (
      [fed.batch for fed in islice(make_dataloader(data_options(config), p.eval_batch, split="eval"), 2)],
      next(p.feed()).batch,
    )
  )
  assert (batches[0].inputs != trained.inputs).mean() > 0.3
  decoder = program(config).model.bind(jax.device_get(state.params))
  expected = [
    optax.softmax_cross_entropy_with_integer_labels(
      decoder.logits(decoder.hidden(b.inputs, b.positions, b.segments)[0]), b.targets
    ).mean()
    for b in batches
  ]
  assert history.figures[-1]["eval_loss"] == pytest.approx(float(np.mean(expected)), abs=1e-5)
  assert history.figures[-1]["eval_tokens"] == 2 * 64 * 32
  assert "<dt>Evaluation loss</dt>" in (tmp_path / "evaluated" / "report.html").read_text()


def test_a_run_ends_at_its_target(capsys):
  history = History()
  config = tiny(steps=50, eval_interval=2, eval_steps=1, target_eval_loss=4.8, learning_rate=1e-2)
  state = maxtext.train(config, callbacks=[history])
  found = [f["eval_loss"] for f in history.figures if "eval_loss" in f]
  assert found[-1] <= 4.8 < found[-2]
  assert int(state.step) == len(history.figures) < 50
  shown = capsys.readouterr().out
  assert f"eval loss {found[-1]:.4f}" in shown
  assert "target_eval_loss=4.8 is reached at step" in shown


@pytest.mark.slow
def test_what_takes_the_state_is_not_in_a_steps_time():
  p, history = program(tiny()), History()

  def slow(_):
    time.sleep(5.0)
    return {"loss": 1.0}

  run_loop(p.step, p.init(), p.feed(), range(4), [Evaluate(slow, 3, 0.0), history])
  assert max(f["step_time_seconds"] for f in history.figures[1:]) < 4.0, "steps of a busy machine take a second"
  assert all(f["step_time_seconds"] > 0 for f in history.figures)
  assert history.figures[2]["eval_seconds"] >= 5.0


@pytest.mark.slow
def test_a_steps_time_ends_when_it_has_finished_and_not_when_it_is_read():
  """Metrics of two steps are read one after the other where a callback is due, long after both have finished."""
  p, history = program(tiny()), History()

  def slow_batches():
    for batch in p.feed():
      time.sleep(1.0)
      yield batch

  class Due(Callback):
    def due(self, step):
      return step == 5

  run_loop(p.step, p.init(), slow_batches(), range(7), [Due(), history])
  assert history.figures[4]["step_time_seconds"] > 0.3


@pytest.mark.slow
def test_a_callback_sees_the_state_and_the_position_of_its_step():
  seen = []

  class Look(Callback):
    def due(self, step):
      return step in (2, 3)

    def on_update(self, step, state, position, figures):
      seen.append((step, int(state.step), int(position()["batches"])))
      return step == 3

  p = program(tiny())
  state = run_loop(p.step, p.init(), p.feed(), range(6), [Look()])
  assert seen == [(2, 2, 2), (3, 3, 3)]
  assert int(state.step) == 3


def test_spikes_leave_everything_as_it_was():
  """Against a plain list of what was seen."""
  inner = optax.adam(0.1)
  guarded = skip_spikes(inner, interval=8, deviations=6.0)
  rng = np.random.default_rng(0)
  params = expected = {"w": np.ones(3, np.float32)}
  state, plain = guarded.init(params), inner.init(params)
  history: list[tuple[float, float]] = []
  skipped = 0
  for step in range(40):
    loss, norm = (float(x) for x in 1 + 0.1 * rng.random(2))
    loss += 5.0 * (step in (1, 13, 27))
    norm = float("nan") if step == 20 else norm + 5.0 * (step == 33)
    grads = {"w": rng.normal(size=3).astype(np.float32)}
    recent = np.array(history[-8:], np.float32)
    spike = len(recent) >= 4 and any(
      not x <= recent[:, i].mean() + 6 * recent[:, i].std() for i, x in enumerate((loss, norm))
    )
    if not spike and np.isfinite(norm):
      updates, plain = inner.update(grads, plain, expected)
      expected = optax.apply_updates(expected, updates)
    else:
      skipped += 1
    if np.isfinite(norm):
      history.append((loss, norm))
    updates, state = guarded.update(grads, state, params, loss=np.float32(loss), grad_norm=np.float32(norm))
    params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params["w"], expected["w"])
  assert skipped == int(state.skipped_steps) == 4, "step 1 has too little before it to be called a spike"


@pytest.mark.slow
def test_spikes_are_counted_in_the_figures():
  """And the learning rate is that of the updates: one that is left out does not move the schedule on."""
  history = History()
  p = program(tiny(steps=12, skip_step_on_spikes=True, skip_step_interval=4, skip_step_scaling_factor=-1e9))
  state = run_loop(p.step, p.init(), p.feed(), range(12), [history])
  assert [f["skipped_steps"] for f in history.figures] == [0, 0, *range(1, 11)]
  rate = learning_rate(schedule_options(p.config))
  (applied,) = {int(count) for _, count in optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")}
  assert applied == 2
  np.testing.assert_allclose(
    [f["learning_rate"] for f in history.figures], [rate(0), rate(1), *[rate(applied)] * 10], rtol=1e-6
  )


@pytest.mark.slow
@pytest.mark.parametrize("key", ["optimizer_memory_host_offload", "parameter_memory_host_offload"])
@pytest.mark.mesh
def test_state_may_rest_in_host_memory(key):
  config = tiny(steps=4, per_device_batch_size=4, eval_interval=2, eval_steps=1, **{key: True})
  p = program(config, devices=2)
  state = p.init()
  resting = state.params if key.startswith("parameter") else state.opt_state
  assert {a.sharding.memory_kind for a in jax.tree.leaves(resting) if a.ndim} == {"pinned_host"}
  assert p.evaluate(state)["loss"] > 4
  plain = losses(tiny(steps=4, per_device_batch_size=4), devices=2)
  np.testing.assert_allclose(losses(config, devices=2), plain, atol=1e-6)


def test_utilisation_is_the_models_arithmetic_over_the_chips_peak():
  p, history = program(tiny()), History()
  flops = train_flops_per_token(p.model, 32)
  run_loop(p.step, p.init(), p.feed(), range(2), [history], flops, peak_flops=1e12)
  for f in history.figures:
    assert f["mfu"] == pytest.approx(f["tokens"] / f["step_time_seconds"] * flops / 1e12)
    assert f["mfu"] == pytest.approx(f["tflops_per_device"])


@pytest.mark.parametrize(
  ("kind", "chip"),
  [("TPU v5", "v5p"), ("TPU v5 lite", "v5e"), ("TPU v6 lite", "v6e"), ("TPU v4", "v4"), ("TPU7x", "tpu7x"),
   ("NVIDIA H100 80GB HBM3", "h100"), ("cpu", None)],
)  # fmt: skip
def test_the_peak_of_a_device(kind, chip):
  assert find_chip(kind) == (CHIPS[chip] if chip else None)


def test_tensorboard_events(tmp_path):
  from tensorboardX.proto.event_pb2 import Event

  sink = TensorBoardWriter(tmp_path)
  for step in (1, 2):
    sink.write(step, {"loss": step / 4, "learning_rate": 0.5})
  sink.close()
  (path,) = tmp_path.iterdir()
  data, events = path.read_bytes(), []
  while data:
    (size,) = struct.unpack("<Q", data[:8])
    events.append(Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
  found = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
  assert found == {(1, "loss"): 0.25, (1, "learning_rate"): 0.5, (2, "loss"): 0.5, (2, "learning_rate"): 0.5}


@pytest.mark.slow
def test_dumps_of_the_step(tmp_path):
  config = tiny(steps=2, run_name="dumped", base_output_directory=str(tmp_path), dump_hlo=True, dump_jaxpr=True,
                dump_hlo_local_dir=str(tmp_path / "xla"), dump_jaxpr_local_dir=str(tmp_path / "jaxpr"),
                dump_jaxpr_delete_local_after=False, dump_jaxpr_gcs_dir=str(tmp_path / "elsewhere"))  # fmt: skip
  maxtext.train(config)
  (jaxpr,) = (tmp_path / "elsewhere").iterdir()
  assert "scan" in jaxpr.read_text()
  assert len(list((tmp_path / "jaxpr").iterdir())) == 1
  (compiled,) = (tmp_path / "dumped" / "xla_dump").glob("*jit_train_step*after_optimizations.txt")
  assert "all-reduce" in compiled.read_text()
  assert not list((tmp_path / "xla").iterdir())


@pytest.mark.slow
def test_traces_again_and_again(tmp_path):
  config = tiny(steps=9, run_name="traced", base_output_directory=str(tmp_path), profiler="xplane", profiler_steps=1,
                skip_first_n_steps_for_profiler=2, profile_periodically_period=4)  # fmt: skip
  maxtext.train(config)
  traces = sorted((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))
  assert [path.parts[-5] for path in traces] == ["after-step-2", "after-step-6"]
  assert [step_markers(path) for path in traces] == [[3], [7]]


@pytest.mark.slow
def test_a_trace_takes_options_of_tpus_and_may_leave_step_markers_out(tmp_path, monkeypatch):
  given, start = [], jax.profiler.start_trace

  def noting(folder, profiler_options):
    given.append(dict(profiler_options.advanced_configuration))
    start(folder, profiler_options=profiler_options)

  monkeypatch.setattr(jax.profiler, "start_trace", noting)
  config = tiny(steps=3, run_name="traced", base_output_directory=str(tmp_path), profiler="xplane", profiler_steps=1,
                enable_tpu_profiling_options=True, tpu_num_chips_to_profile_per_task=3, profile_power_events=True,
                xprof_tpu_power_trace_level=2, xprof_e2e_enable_fw_thermal_event=True,
                hide_profiler_step_metric=True)  # fmt: skip
  maxtext.train(config)
  assert given == [{
    "tpu_num_chips_to_profile_per_task": 3, "tpu_num_sparse_cores_to_trace": 2, "tpu_num_sparse_core_tiles_to_trace": 1,
    "tpu_power_trace_level": 2, "tpu_e2e_enable_fw_throttle_event": False, "tpu_e2e_enable_fw_power_level_event": False,
    "tpu_e2e_enable_fw_thermal_event": True,
  }]  # fmt: skip
  (trace,) = (tmp_path / "traced" / "profile").rglob("*.xplane.pb")
  assert step_markers(trace) == []


def step_markers(trace):
  """The numbers of the steps that a trace marks."""
  planes = jax.profiler.ProfileData.from_file(str(trace)).planes
  events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
  return [dict(event.stats)["step_num"] for event in events]
