"""Samples while training: what they are, that they change no bit of a run and compile once, and when there are none."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError
from maxtext.data.held_out import HeldOutRule
from maxtext.data.options import tokenizer_options
from maxtext.data.prepare import in_processes, prepare
from maxtext.data.raw_text import find_files
from maxtext.inference.llm import LLM
from maxtext.inference.sampling import SamplingParams
from maxtext.observe.sample_writer import Sample, SampleWriter
from maxtext.training.callbacks.base import Callback
from maxtext.training.callbacks.samples import MAX_TOKENS, Sampler
from maxtext.training.live_engine import LiveEngine
from tests import vocabularies
from tests.support import History, program, tiny

COMPILED = "/jax/core/compile/backend_compile_duration"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def sentence(number):
  rng = np.random.default_rng(number)
  return " ".join(rng.choice(WORDS, 12)) + ".\n"


def prepared(folder, sentences, held_out):
  """A prepared corpus of so many sentences, with a tokenizer of its words."""
  (folder / "input.txt").write_text("".join(map(sentence, range(sentences))))
  vocabulary = vocabularies.hugging_face(folder / "vocabulary", texts=map(sentence, range(20)))
  config = tiny(dataset_type="grain", tokenizer_type="huggingface", tokenizer_path=str(vocabulary), vocab_size=512)
  files, to = find_files([str(folder / "input.txt")]), str(folder / "out")
  prepare(tokenizer_options(config), files, to, in_processes(1), held_out=HeldOutRule(held_out))
  return to


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return prepared(tmp_path_factory.mktemp("samples"), 3000, held_out=0.05)


@pytest.fixture
def configured(corpus, tmp_path):
  def make(**changes):
    keys = {
      "dataset_type": "grain", "grain_train_files": corpus, "vocab_size": 512, "grain_worker_count": 0,
      "grain_worker_count_eval": 0, "per_device_batch_size": 1, "eval_interval": 2, "eval_steps": 1, "steps": 6,
      "learning_rate": 1e-2, "base_output_directory": str(tmp_path), "run_name": "run",
      "sample_prompts": ["the quick", "a"], "decode_sampling_strategy": "weighted",
    }  # fmt: skip
    return tiny(**keys | changes)

  return make


def samples_of(folder):
  return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


class Compilations(Callback):
  """How many programs had been compiled when each step ended."""

  def __init__(self):
    self.count, self.at = 0, []
    jax.monitoring.register_event_duration_secs_listener(self.note)

  def note(self, event, seconds, **more):
    self.count += event == COMPILED

  def on_step(self, step, metrics):
    self.at.append(self.count)

  def close(self):
    jax.monitoring.unregister_event_duration_listener(self.note)


def test_samples_change_no_bit_of_a_run_and_compile_once(configured, tmp_path, capsys):
  histories, counts = {}, {}
  for name, prompts in (("with", ["the quick", "a", ""]), ("without", [])):
    histories[name], counts[name] = History(), Compilations()
    config = configured(run_name=name, sample_prompts=prompts, eval_interval=1)
    states = maxtext.train(config, callbacks=[histories[name], counts[name]])
    histories[name].state = jax.device_get(states.params)
  np.testing.assert_array_equal(histories["with"].losses, histories["without"].losses)
  for path, array in histories["with"].state.items():
    np.testing.assert_array_equal(array, histories["without"].state[path])
  at = counts["with"].at
  assert at[0] > counts["without"].at[0], "the engine is compiled with the first samples"
  assert at[0] == at[-1], "and not again"
  found = samples_of(tmp_path / "with")
  assert [(line["step"], line["prompt"]) for line in found] == [
    (step, prompt) for step in range(1, 7) for prompt in ("the quick", "a", "")
  ]
  assert all(line.keys() == {"step", "prompt", "text"} and line["text"] for line in found)
  assert len({line["text"] for line in found}) > 12, "each step has a seed of its own"
  said = capsys.readouterr().out
  line = found[0]
  assert f'sample at step 1: "the quick" -> {json.dumps(line["text"], ensure_ascii=False)}\n' in said
  assert not (tmp_path / "without" / "samples.jsonl").exists()


def test_a_sample_is_what_the_checkpoint_says(configured, tmp_path):
  maxtext.train(configured(enable_checkpointing=True, async_checkpointing=False))
  *_, one, other = samples_of(tmp_path / "run")
  assert (one["step"], other["step"]) == (6, 6)
  llm = LLM(tmp_path / "run", max_prefill_predict_length=16, jax_cache_dir="")
  outputs = llm.generate(["the quick", "a"], SamplingParams(seed=6, max_tokens=MAX_TOKENS))
  assert [one["text"], other["text"]] == [output.text for output in outputs]


def test_a_resumed_run_writes_its_samples_again(configured, tmp_path):
  whole, parts = History(), History()
  maxtext.train(configured(run_name="whole", enable_checkpointing=True), callbacks=[whole])
  keys = {"run_name": "parts", "enable_checkpointing": True, "learning_rate_schedule_steps": 6}
  maxtext.train(configured(**keys, steps=3), callbacks=[parts])
  with open(tmp_path / "parts" / "samples.jsonl", "a") as file:  # a step that was not saved, and a torn line
    file.write('{"step": 4, "prompt": "a", "text": "old"}\n{"step": 4, "pro')
  maxtext.train(configured(**keys), callbacks=[parts])
  assert samples_of(tmp_path / "parts") == samples_of(tmp_path / "whole")
  np.testing.assert_array_equal(parts.losses, whole.losses)


@pytest.mark.nightly
def test_tensorboard_shows_samples_as_text(configured, tmp_path):
  from tensorboardX.proto.event_pb2 import Event

  maxtext.train(configured(steps=2))
  (file,) = (tmp_path / "run" / "tensorboard" / "samples").iterdir()
  data, events = file.read_bytes(), []
  while data:  # TFRecords: length, its checksum, the record, its checksum
    size = int.from_bytes(data[:8], "little")
    events.append(Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
  assert events[0].file_version == "brain.Event:2"
  assert [event.step for event in events[1:]] == [2]
  values = events[1].summary.value
  assert [value.tag for value in values] == ["sample_0", "sample_1"]
  for value, line in zip(values, samples_of(tmp_path / "run"), strict=True):
    assert value.metadata.plugin_data.plugin_name == "text"
    assert [dim.size for dim in value.tensor.tensor_shape.dim] == [1]
    text = value.tensor.string_val[0].decode()
    assert text.replace("\n    ", "\n") == "    " + line["prompt"] + line["text"]


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"ici_context_parallelism": 2}, "they are for meshes of data, fsdp, tensor, and this one has {'context': 2}."),
    ({"shard_mode": "explicit"}, "they are not for shard_mode=explicit."),
  ],
)
def test_where_the_engine_cannot_run_there_are_no_samples(configured, changes, reason, capsys):
  assert Sampler.of(program(configured(per_device_batch_size=2, **changes), devices=8)) is None
  assert f"maxtext: sample_prompts: the run writes no samples: {reason}" in "".join(capsys.readouterr())


def test_several_processes_write_no_samples(configured, monkeypatch, caplog):
  one = program(configured())
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert Sampler.of(one) is None
  assert "they are for runs of one process, and this one has 2." in caplog.text


def test_data_without_a_tokenizer_has_no_samples(configured, corpus, tmp_path, caplog):
  assert Sampler.of(program(configured(dataset_type="synthetic"))) is None
  assert not caplog.records, "a recipe may have prompts, and be tried on synthetic data"
  bare = tmp_path / "bare"
  bare.mkdir()
  manifest = json.loads(Path(corpus, "manifest.json").read_text())
  for shard in (*manifest["shards"], *manifest["held_out"]["shards"]):
    (bare / shard["file"]).symlink_to(f"{corpus}/{shard['file']}")
  (bare / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": {}}))
  assert Sampler.of(program(configured(grain_train_files=str(bare)))) is None
  assert "the run writes no samples: tokenizer_path is not set" in caplog.text


MESHES = [
  pytest.param({"ici_fsdp_parallelism": 8}, marks=pytest.mark.nightly),
  {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
]


@pytest.mark.parametrize("devices", MESHES)
def test_samples_of_a_mesh_are_those_of_one_device(configured, devices):
  found = []
  for count, keys in ((1, {}), (8, devices)):
    p = program(configured(**keys), count)
    state = p.init()
    found.append(Sampler.of(p).sample(3, state.params | state.buffers))
  assert found[0] == found[1]


def test_prompts(configured):
  """What no token is for becomes whatever the tokenizer makes of it; too much is refused before the run begins."""
  p = program(configured(sample_prompts=["\U0001f9aa \x00 \ud7a3", "", "the " * 20]))
  state = p.init()
  assert len(Sampler.of(p).sample(1, state.params | state.buffers)) == 3
  for prompts in (["the " * 40], ["a", "dog " * 32]):
    with pytest.raises(ConfigError, match=r"sample_prompts: '.*' has \d+ tokens, and 1 to 31 leave room for"):
      Sampler.of(program(configured(sample_prompts=prompts)))
  with pytest.raises(ConfigError, match="sample_prompts: '' has 0 tokens"):
    Sampler.of(program(configured(sample_prompts=[""], add_bos=False)))
  assert Sampler.of(program(configured(sample_prompts=[]))) is None


def test_a_sample_that_fails_does_not_end_the_run(configured, monkeypatch, tmp_path, capsys):
  def fail(*_):
    raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nfor this")

  monkeypatch.setattr(LiveEngine, "_make", fail)
  history = History()
  maxtext.train(configured(), callbacks=[history])
  assert len(history.losses) == 6
  said = "".join(capsys.readouterr())
  assert said.count("no more samples, since one failed: RESOURCE_EXHAUSTED: no memory\n") == 1
  assert samples_of(tmp_path / "run") == []


def test_nothing_in_a_sample_acts_on_a_terminal(tmp_path, caplog):
  writer = SampleWriter(tmp_path, 0, tensorboard=False)
  with caplog.at_level("INFO", logger="maxtext"):
    writer.write(3, [Sample("a\x1b[2J", "b\x7f\x9b31m\u202ec\nd")])
  writer.close()
  (line,) = (record.getMessage() for record in caplog.records)
  assert line == 'sample at step 3: "a\\u001b[2J" -> "b\\x7f\\x9b31m\\u202ec\\nd"'
  assert json.loads((tmp_path / "samples.jsonl").read_text())["text"] == "b\x7f\x9b31m\u202ec\nd", "as it is"
