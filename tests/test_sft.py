"""Supervised fine-tuning: from files of conversations to a loss, on any mesh, packed or not, and after a restart."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.data.conversations import conversation_sequences
from maxtext.data.dataloader import make_dataloader
from maxtext.data.options import data_options
from maxtext.inference.llm import LLM
from maxtext.mesh.devices import make_mesh
from maxtext.training.callbacks.samples import MAX_TOKENS, Sampler
from maxtext.training.program import Program
from tests.chat_templates import TEMPLATES, VOCAB_SIZE, make_tokenizer, open_tokenizer
from tests.support import TINY, program
from tests.test_conversations import prefilled

ANSWERS = ("the other", "the\n\nlast", "is", "and the one, and the other")


def talk(number):
  """A conversation of one to three turns, with reasoning that the template drops from earlier ones."""
  messages = []
  for turn in range(1 + number % 3):
    messages.append({"role": "user", "content": f"the one {number}?" * (1 + turn)})
    answer = {"role": "assistant", "content": ANSWERS[(number + turn) % 4]}
    messages.append(answer | ({"reasoning_content": f"is {turn}"} if number % 2 else {}))
  return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer, a template, and files of 48 conversations and 16 others."""
  path = make_tokenizer(tmp_path_factory.mktemp("sft"))
  (path / "qwen3.jinja").write_text(TEMPLATES["qwen3"])
  for name, numbers in (("train", range(48)), ("eval", range(100, 116))):
    rows = [json.dumps({"id": number, "messages": talk(number)}) for number in numbers]
    (path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
  return path


def sft_keys(folder, **changes):
  keys = TINY | {
    "use_sft": True, "vocab_size": VOCAB_SIZE, "max_target_length": 256, "per_device_batch_size": 1,
    "tokenizer_type": "huggingface", "tokenizer_path": str(folder), "chat_template_path": str(folder / "qwen3.jinja"),
    "grain_train_files": str(folder / "train.jsonl"), "grain_eval_files": str(folder / "eval.jsonl"),
    "grain_worker_count": 0, "enable_checkpointing": False, "dataset_type": "grain",
  }  # fmt: skip
  return keys | changes


def batches(config, devices=1):
  program = Program.of(config, make_mesh(config, jax.devices()[:devices]))
  return program, make_dataloader(data_options(config), program.batch)


def documents_of(batch):
  """{inputs, targets and weights of each segment}, of all rows."""
  found = []
  for row in range(len(batch.inputs)):
    segments = np.asarray(batch.segments[row])
    for number in range(1, int(segments.max(initial=0)) + 1):
      here = segments == number
      arrays = (np.asarray(a)[row][here] for a in (batch.inputs, batch.targets, batch.weights))
      assert np.array_equal(np.asarray(batch.positions)[row][here], np.arange(here.sum()))
      found.append(tuple(tuple(array.tolist()) for array in arrays))
  return found


@pytest.mark.parametrize("packing", [True, False])
def test_batches_hold_every_sequence_of_every_conversation_once(folder, packing):
  config = load_config(**sft_keys(folder, packing=packing, generate_padding_batch_train=True))
  _, loader = batches(config)
  found = [document for fed in loader for document in documents_of(fed.batch)]
  tokenizer = open_tokenizer(folder, "qwen3")
  expected = [
    (tuple(one.tokens[:-1]), tuple(one.tokens[1:]), tuple(one.weights[1:]))
    for number in range(48)
    for one in conversation_sequences(tokenizer, talk(number), {}, True)
  ]
  assert len(expected) > 48, "some conversations have more than one sequence"
  assert sorted(found) == sorted(expected)


def total_loss(folder, devices=1, **changes):
  """The sum of the losses of all trained tokens of an epoch, and their number, by the evaluation of the run."""
  changes = {"eval_interval": 1, "eval_steps": -1, "generate_padding_batch_eval": True} | changes
  changes["grain_eval_files"] = str(folder / "train.jsonl")
  config = load_config(**sft_keys(folder, **changes))
  program = Program.of(config, make_mesh(config, jax.devices()[:devices]))
  found = program.evaluate(program.init())
  return found["loss"], found["tokens"]


def test_the_loss_is_that_of_the_answers_packed_or_not_on_any_mesh(folder):
  expected, tokens = total_loss(folder, packing=False, eval_per_device_batch_size=4)
  tokenizer = open_tokenizer(folder, "qwen3")
  trained = [sum(one.weights[1:]) for n in range(48) for one in conversation_sequences(tokenizer, talk(n), {}, True)]
  assert tokens == sum(trained)
  for devices, changes in (
    (1, {"packing": True, "eval_per_device_batch_size": 2}),
    (1, {"packing": True, "eval_per_device_batch_size": 2, "num_vocab_tiling": 4}),
    (8, {"packing": True, "eval_per_device_batch_size": 1, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}),
    (8, {"packing": True, "eval_per_device_batch_size": 0.5, "ici_context_parallelism": 2, "ici_data_parallelism": 4}),
  ):
    loss, count = total_loss(folder, devices, **changes)
    assert count == tokens
    assert loss == pytest.approx(expected, abs=1e-5), changes


def steps_of(folder, out, **changes):
  config = load_config(**sft_keys(folder, base_output_directory=str(out), num_epoch=20, **changes))
  maxtext.train(config)
  lines = (out / config.run_name / "metrics.jsonl").read_text().splitlines()
  return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_and_learns(folder, tmp_path):
  keys = {"learning_rate": 1e-2, "enable_checkpointing": True, "checkpoint_period": 3, "per_device_batch_size": 2}
  whole = steps_of(folder, tmp_path, run_name="whole", steps=6, **keys)
  steps_of(folder, tmp_path, run_name="parts", steps=3, learning_rate_schedule_steps=6, **keys)
  parts = steps_of(folder, tmp_path, run_name="parts", steps=6, **keys)
  assert whole == parts
  assert whole[6] < whole[1]


@pytest.mark.slow
def test_uneven_micro_batches_count_every_token_alike(folder, tmp_path):
  keys = {"learning_rate": 1e-2, "steps": 3}
  once = steps_of(folder, tmp_path, run_name="once", per_device_batch_size=2, **keys)
  parts = steps_of(folder, tmp_path, run_name="parts", per_device_batch_size=1, gradient_accumulation_steps=2, **keys)
  for step, loss in once.items():
    assert parts[step] == pytest.approx(loss, abs=1e-5)


def write(path, *rows):
  path.write_text("\n".join(map(json.dumps, rows)) + "\n")
  return str(path)


USER, ANSWER = {"role": "user", "content": "the"}, {"role": "assistant", "content": "one"}


@pytest.mark.parametrize(
  ("rows", "changes", "message"),
  [
    ([{"messages": [USER]}], {}, "no conversation has an answer"),
    ([{"messages": [USER, ANSWER | {"train": False}]}], {}, "no conversation has an answer"),
    ([{"messages": [USER, ANSWER]}], {"max_target_length": 8}, "all answers are longer than max_target_length"),
    ([{"messages": "hello"}], {}, "needs a column of messages, or the columns prompt and completion"),
    ([{"text": "hello"}], {}, "no messages; it has text. Set the \\*_data_columns keys"),
    ([{"messages": [USER, ANSWER]}, {"messages": [{"role": "x"}]}], {}, "record 1: messages.0.role: 'x' is not one of"),
    ([{"prompt": "a", "completion": [ANSWER]}], {"train_data_columns": ["prompt", "completion"]}, "must both be texts"),
    ([{"messages": [USER, ANSWER]}], {"formatting_func_path": "no.such"}, "formatting_func_path=no.such cannot be imp"),
    ([{"messages": [USER, ANSWER]}], {"formatting_func_path": "math.pi"}, "must be the import path of a function"),
    ([{"messages": [USER, ANSWER]}], {"formatting_func_path": "builtins.len"}, "must return a list of messages"),
    (
      [{"messages": [USER, ANSWER]}],
      {"formatting_func_path": "builtins.int"},
      "int fails with TypeError: int",
    ),
    ([{"messages": [USER, ANSWER]}], {"chat_template_path": "", "chat_template": ""}, "has no chat template"),
  ],
)
def test_data_that_trains_nothing_or_is_no_conversation_is_named(folder, tmp_path, rows, changes, message):
  files = {"grain_train_files": write(tmp_path / "rows.jsonl", *rows)}
  config = load_config(**sft_keys(folder, **(files | changes)))
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  with pytest.raises((ConfigError, maxtext.configs.errors.RunError), match=message):
    program.data.check()


def shouting(row, *, mark):
  """A formatting function."""
  return row["question"] + mark, row["answer"].upper()


def test_rows_of_other_forms(folder, tmp_path):
  """Messages as JSON text, prompt and completion as text and as messages, and what a function makes of a row."""
  pairs = {"prompt": [USER], "completion": [ANSWER]}
  plain = {"prompt": "the", "completion": "one"}
  forms = [
    ({"messages": json.dumps([USER, ANSWER])}, {}),
    (pairs, {"train_data_columns": ["prompt", "completion"]}),
    (plain, {"train_data_columns": ["prompt", "completion"]}),
    ({"turns": [USER, ANSWER]}, {"train_data_columns": ["turns"]}),
  ]
  seen = []
  for row, changes in forms:
    files = write(tmp_path / "rows.jsonl", *[row] * 8)
    config = load_config(**sft_keys(folder, grain_train_files=files, generate_padding_batch_train=True, **changes))
    seen.append(documents_of(next(batches(config)[1]).batch)[0])
  assert len(set(seen)) == 1
  files = write(tmp_path / "rows.jsonl", *[{"question": "the", "answer": "one"}] * 8)
  keys = {"train_data_columns": ["question", "answer"], "formatting_func_path": "tests.test_sft:shouting"}
  keys |= {"formatting_func_kwargs": {"mark": "?"}, "use_chat_template": False, "generate_padding_batch_train": True}
  config = load_config(**sft_keys(folder, grain_train_files=files, **keys))
  inputs, targets, weights = documents_of(next(batches(config)[1]).batch)[0]
  tokenizer = open_tokenizer(folder, "qwen3")
  assert tokenizer.decode(inputs) == "the?ONE"
  assert tokenizer.decode([token for token, weight in zip(targets, weights, strict=True) if weight]) == "ONE"


def test_what_is_too_long_is_said(folder, tmp_path, caplog):
  long = [USER, ANSWER, USER, ANSWER | {"content": "one " * 300}]
  files = write(tmp_path / "rows.jsonl", *[{"messages": [USER, ANSWER]}] * 8, {"messages": long})
  config = load_config(**sft_keys(folder, grain_train_files=files, num_epoch=2))
  with caplog.at_level("INFO", "maxtext"):
    Program.of(config, make_mesh(config, jax.devices()[:1])).data.check()
  assert "9 conversations; 10 answers, 1 longer than max_target_length=256 and left out;" in caplog.text
  assert caplog.text.endswith("train; 2 epochs\n")


def test_a_prepared_corpus_is_no_data_of_conversations(folder, tmp_path):
  (tmp_path / "manifest.json").write_text("{}")
  config = load_config(**sft_keys(folder, grain_train_files=str(tmp_path)))
  program = Program.of(config, make_mesh(config, jax.devices()[:1]))
  with pytest.raises(ConfigError, match="is a prepared corpus of tokens; give files of conversations"):
    program.data.check()


def test_the_keys_of_fine_tuning(folder):
  config = load_config(use_sft=True)
  assert (config.learning_rate, config.sft_train_on_completion_only, config.train_data_columns) == (
    2e-5, True, ["messages"],
  )  # fmt: skip
  assert load_config(use_sft=True, learning_rate=1.0).learning_rate == 1.0
  assert load_config("sft.yml").use_sft
  with pytest.raises(ConfigError, match="use_sft=True is not supported: it needs conversations"):
    load_config(use_sft=True, dataset_type="synthetic")
  with pytest.warns(maxtext.configs.errors.ConfigWarning, match="no effect without use_sft=true"):
    load_config(sft_train_on_completion_only=True)


def test_samples_are_answers_to_a_message_of_a_user(folder, tmp_path):
  """Their prompts are what the server prefills, and their texts what the run's last checkpoint answers."""
  prompts = ["the one?", "<|im_end|> and"]
  keys = {"eval_interval": 2, "eval_steps": 1, "sample_prompts": prompts, "base_output_directory": str(tmp_path)}
  keys |= {"steps": 2, "run_name": "run", "enable_checkpointing": True, "learning_rate": 1e-2, "num_epoch": 20}
  config = load_config(**sft_keys(folder, **keys))
  tokenizer = open_tokenizer(folder, "qwen3")
  requests = [prefilled(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
  assert [tokens for _, tokens in Sampler.of(program(config, 8))._prompts] == requests
  plain = program(config.model_copy(update={"use_chat_template": False}), 8)
  assert [tokens for _, tokens in Sampler.of(plain)._prompts] == [tokenizer.encode(p).tolist()[:-1] for p in prompts]
  maxtext.train(config)
  found = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
  assert [(line["step"], line["prompt"]) for line in found] == [(2, prompt) for prompt in prompts]
  llm = LLM(tmp_path / "run", max_prefill_predict_length=64, jax_cache_dir="")
  outputs = llm.generate(prompts, replace(llm.sampling_params, seed=2, max_tokens=MAX_TOKENS))
  assert [list(output.prompt_token_ids) for output in outputs] == requests
  assert [line["text"] for line in found] == [output.text for output in outputs]
