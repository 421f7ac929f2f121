"""Conversations of a policy with environments: tokens are those that were generated, and no environment ends a run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import maxtext
from maxtext import ConfigError, load_config
from maxtext.data.conversations import ChatContinuation
from maxtext.inference.inference_model import load_run_tokenizer
from maxtext.inference.llm import RequestOutput
from maxtext.inference.sampling import SamplingParams
from maxtext.rl.environment import EnvironmentTask
from maxtext.rl.environment_process import EnvironmentServer
from maxtext.rl.multi_turn import MultiTurn
from maxtext.rl.tasks import Task
from tests.chat_templates import VOCAB_SIZE, make_tokenizer, open_tokenizer
from tests.support import History
from tests.test_rl import StopAt, keys
from tests.test_rl import folder as tasks_folder
from tests.test_rl import run as rl_run

folder, run = tasks_folder, rl_run

OWN = """
import os, random, subprocess, sys, time
from maxtext.rl.environment import GymnasiumEnvironment, Observation

class Base:
  def reset(self, task):
    self.task, self.turn = task, 0

  def step(self, text):
    self.turn += 1
    return self.answer(text)

class Three(Base):
  def answer(self, text):
    return Observation("=", text.count(self.task.answer) / max(len(text), 1), self.turn == 3)

class Endless(Base):
  def answer(self, text):
    return "=", 0.5, False

class Silent(Base):
  def answer(self, text):
    return "", 0.0, self.turn == 2

class Raises(Base):
  def answer(self, text):
    if self.turn == 2:
      return "", 1.0, True
    raise ValueError("1")

class Number(Base):
  def answer(self, text):
    return 7, 0.0, False

class Reward(Base):
  def answer(self, text):
    return "", float("nan"), False

class Nothing(Base):
  def answer(self, text):
    pass

class Long(Base):
  def answer(self, text):
    return "=" * 100, 0.5, False

class Enormous(Base):
  def answer(self, text):
    return "=" * 10**8, 0.5, False

class Exits(Base):
  def answer(self, text):
    sys.exit(0)

class Killed(Base):
  def answer(self, text):
    os.kill(os.getpid(), 9)

class Hangs(Base):
  def answer(self, text):
    if "2" in text:
      child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
      open("pid", "w").write(f"{os.getpid()} {child.pid}")
      time.sleep(1000)
    return "=", 1.0, self.turn == 2

class NoReset(Base):
  def reset(self, task):
    raise KeyError("none")

class LongPrompt(Base):
  def reset(self, task):
    return "1" * 100

class WrongPrompt(Base):
  def reset(self, task):
    return [{"role": "user", "content": "1"}]

class Prompt(Base):
  def reset(self, task):
    super().reset(task)
    return task.answer

  def answer(self, text):
    return "", 0.0, True

class Surrogate(Base):
  def answer(self, text):
    return "\\ud800=", 0.0, self.turn == 2

class Chance(Base):
  def answer(self, text):
    return str(random.randrange(10)), random.random(), False

class Names(Base):
  def answer(self, text):
    return "<|im_end|>1", 0.0, self.turn == 2

class Lake:
  def reset(self, seed):
    self.place = seed
    return self.place, {}

  def step(self, action):
    self.place += action
    return self.place, 1.0 if self.place == 5 else 0.0, self.place == 5, self.place > 9, {}

class Walk(GymnasiumEnvironment):
  def __init__(self):
    super().__init__(Lake(), int)

class NoStep:
  def reset(self, task):
    pass
"""


@pytest.fixture
def place(folder, monkeypatch):
  (folder / "own_environments.py").write_text(OWN)
  monkeypatch.chdir(folder)
  return folder


@pytest.fixture
def converse(place, tmp_path):
  """Conversations of a policy that always says the same, one text for each task. Returns them, the prompts of every
  turn, and the tokenizer."""
  opened = []

  def start(name, texts, answers=None, **changes):
    own = {"rl_environment": f"own_environments:{name}", "max_target_length": 30, "environment_timeout": 3.0,
           "reward_functions": []}  # fmt: skip
    config = load_config(**keys(place, tmp_path, **own | changes))
    tokenizer = load_run_tokenizer(config)
    opened.append(talk := MultiTurn(config, tokenizer))
    asked = [Task(f"{n}=", tuple(tokenizer.encode(f"{n}=").tolist()), str(n)) for n in answers or range(len(texts))]
    prompts = []

    def generate(given, params):
      prompts.append([list(one) for one in given])
      return [
        reply(tokenizer, texts[own.seed], prompt, config.max_target_length)
        for prompt, own in zip(given, params, strict=True)
      ]

    return talk(generate, asked, [SamplingParams(seed=n) for n in range(len(asked))]), prompts, tokenizer

  yield start
  for talk in opened:
    talk.close()


def reply(tokenizer, text, prompt, longest):
  """A text, and the end of a document, as far as there is room."""
  ids = [*tokenizer.vocabulary.encode(text, special=False), tokenizer.eos][: longest - len(prompt)]
  end = "stop" if ids[-1] == tokenizer.eos else "length"
  return RequestOutput(tuple(prompt), text, tuple(ids), end, (0,) * len(ids), tuple(-0.5 - i for i in range(len(ids))))


@pytest.mark.parametrize(
  ("name", "end", "turns", "errors", "reward"),
  [
    ("Three", "stop", 3, 0, 1.5),
    ("Endless", "max_turns", 4, 0, 2.0),
    ("Silent", "stop", 2, 0, 0.0),
    ("Raises", "stop", 2, 1, 1.0),
    ("Number", "max_turns", 4, 4, 0.0),
    ("Reward", "max_turns", 4, 4, 0.0),
    ("Nothing", "max_turns", 4, 4, 0.0),
    ("Long", "length", 1, 0, 0.5),
    ("Enormous", "length", 1, 0, 0.5),
    ("Exits", "environment", 1, 1, 0.0),
    ("Killed", "environment", 1, 1, 0.0),
    ("NoReset", "environment", 0, 1, 0.0),
    ("LongPrompt", "environment", 0, 1, 0.0),
    ("WrongPrompt", "environment", 0, 1, 0.0),
    ("Surrogate", "stop", 2, 0, 0.0),
  ],
)
def test_whatever_an_environment_does_a_conversation_ends(converse, name, end, turns, errors, reward):
  long = {"max_target_length": 1000} if errors else {}  # room for what was raised
  began = time.monotonic()
  [found, other], _, tokenizer = converse(name, ["0x", "1"], max_turns=4, **long)
  assert time.monotonic() - began < 60
  assert (found.finish_reason, found.turns, found.tool_errors) == (end, turns, errors)
  assert found.reward == pytest.approx(reward)
  assert len(found.token_ids) == len(found.is_generated) == len(found.logprobs)
  assert sum(found.is_generated) == 3 * turns == sum(log_prob < 0 for log_prob in found.logprobs)
  assert other.turns == turns
  if turns:
    assert found.is_generated[-1], "nothing follows the last answer"
    ids = np.array(found.token_ids)
    assert ids[np.array(found.is_generated)].tolist() == [*tokenizer.encode("0x"), tokenizer.eos] * turns


def test_observations_follow_generated_tokens_which_are_not_encoded_again(converse):
  [found], prompts, tokenizer = converse("Three", ["0x"])
  text, observed = [*tokenizer.encode("0x"), tokenizer.eos], tokenizer.encode("=").tolist()
  start = tokenizer.encode("0=").tolist()
  assert prompts == [[start], [[*start, *text, *observed]], [[*start, *text, *observed, *text, *observed]]]
  assert found.prompt_token_ids == tuple(start)
  assert found.token_ids == (*text, *observed, *text, *observed, *text)
  assert found.is_generated == (True, True, True, False, True, True, True, False, True, True, True)
  assert found.logprobs == (-0.5, -1.5, -2.5, 0.0, -0.5, -1.5, -2.5, 0.0, -0.5, -1.5, -2.5)


def test_what_is_raised_is_read_by_the_policy(converse):
  _, prompts, tokenizer = converse("Raises", ["0"])
  said = tokenizer.decode(prompts[1][0])
  assert said.endswith(tokenizer.decode(tokenizer.encode("ValueError: 1")))


def test_an_answer_that_is_cut_ends_its_conversation(converse):
  [cut, whole], _, _ = converse("Three", ["0" * 40, "1"])
  assert (cut.finish_reason, cut.turns) == ("length", 1)
  assert len(cut.token_ids) + len(cut.prompt_token_ids) == 30
  assert (whole.finish_reason, whole.turns) == ("stop", 3)


def test_one_that_hangs_ends_alone_with_its_processes(converse, place):
  began = time.monotonic()
  found, _, _ = converse("Hangs", ["1", "2", "3"], environment_timeout=5.0)
  assert time.monotonic() - began < 60
  assert [(one.finish_reason, one.turns, one.reward) for one in found] == [
    ("stop", 2, 2.0), ("environment", 1, 0.0), ("stop", 2, 2.0)
  ]  # fmt: skip
  for pid in (place / "pid").read_text().split():
    assert ends(int(pid)), "it is killed, and so is what it started"


def ends(pid):
  for _ in range(50):
    try:
      os.kill(pid, 0)
      if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
        return True
    except (ProcessLookupError, FileNotFoundError):
      return True
    time.sleep(0.1)
  return False


def test_an_environment_may_write_the_prompt(converse):
  [found], prompts, tokenizer = converse("Prompt", ["0"], answers=[7])
  assert prompts[0][0] == list(found.prompt_token_ids) == tokenizer.encode("7").tolist()


def test_chance_is_of_the_task(converse):
  first, again = (converse("Chance", ["a", "b", "a"], answers=[1, 2, 1], max_turns=3)[0] for _ in range(2))
  assert first == again
  assert first[0] == first[2], "answers of a group meet the same chance"
  assert first[0].reward != first[1].reward


def test_environments_of_gymnasium(converse):
  [found, wrong], prompts, tokenizer = converse(
    "Walk", ["1", "x"], answers=[3, 4], max_turns=3, max_prefill_predict_length=4
  )
  assert tokenizer.decode(prompts[0][0]) == "3=3", "the prompt of the task, and the first observation"
  assert (found.reward, found.turns, found.finish_reason) == (1.0, 2, "stop")
  assert (wrong.turns, wrong.tool_errors, wrong.finish_reason) == (1, 1, "length")


def test_a_server_that_was_killed_is_started_anew(place):
  server = EnvironmentServer("own_environments:Three", 10, 100)
  before = server.open()
  assert before.reset(EnvironmentTask("0=", "0")).problem == ""
  server._process.kill()
  server._process.wait()
  assert before.step("0").value == ("=", 1.0, False), "conversations go on"
  after = server.open()
  assert after.reset(EnvironmentTask("0=", "0")) == (None, "", False)
  assert after.step("0").value == ("=", 1.0, False)
  child = after._started
  server.close()
  assert ends(child)
  with pytest.raises(ConfigError, match="rl_environment=own_environments:NoStep: it has no method step"):
    EnvironmentServer("own_environments:NoStep", 10, 100)
  with pytest.raises(ConfigError, match="rl_environment=no_such:Class: ModuleNotFoundError"):
    EnvironmentServer("no_such:Class", 10, 100)


def test_environments_end_with_the_run_that_was_killed(place):
  """Also one that does not answer."""
  server = EnvironmentServer("own_environments:Hangs", 1000, 100)
  environment = server.open()
  environment.reset(EnvironmentTask("", ""))
  environment._pipe.send(("step", "2"))
  while not (place / "pid").exists():
    time.sleep(0.05)
  server._control.close()  # as the kernel does for a killed process
  assert ends(environment._started)
  server._process.send_signal(signal.SIGKILL)
  server._process.wait()


@pytest.fixture
def products(tmp_path, monkeypatch):
  """The data of the example, and a folder from which its environment is found."""
  monkeypatch.chdir(Path(__file__).parents[1])
  subprocess.run([sys.executable, "examples/rl/calculator.py", str(tmp_path / "data")], check=True)
  return tmp_path / "data"


def calculator_keys(products, **changes):
  own = {"tokenizer_path": str(products / "tokenizer"), "grain_train_files": str(products / "tasks.jsonl"),
         "rl_environment": "examples.rl.calculator:Calculator", "reward_functions": [], "stop_strings": [">"],
         "max_prefill_predict_length": 8, "max_target_length": 32, "batch_size": 4, "num_generations": 4,
         "environment_timeout": 10.0}  # fmt: skip
  return keys(products, products, **own | changes)


def test_the_calculator_answers_and_only_the_policy_trains(products):
  config = load_config(**calculator_keys(products))
  tokenizer = load_run_tokenizer(config)
  talk = MultiTurn(config, tokenizer)
  says = {"12*7=": "#12*7", "12*7=#12*7>84=": "84", "3*3=": "9", "4*4=": "15", "5*5=": "#5*"}

  def generate(prompts, params):
    texts = [says.get(tokenizer.decode(prompt), "") for prompt in prompts]
    return [said(tuple(prompt), text) for prompt, text in zip(prompts, texts, strict=True)]

  def said(prompt, text):
    ids = (*tokenizer.encode(text), *(tokenizer.encode(">") if "#" in text else [tokenizer.eos]))
    return RequestOutput(prompt, text, ids, "stop", (), (-1.0,) * len(ids))

  asked = [("12*7=", "84"), ("3*3=", "9"), ("4*4=", "16"), ("5*5=", "25")]
  tasks = [Task(prompt, tuple(tokenizer.encode(prompt).tolist()), answer) for prompt, answer in asked]
  with contextlib.closing(talk):
    found = talk(generate, tasks, [SamplingParams()] * 4)
  assert [(one.turns, one.reward, one.tool_errors) for one in found[:3]] == [(2, 1.0, 0), (1, 1.0, 0), (1, 0.0, 0)]
  assert found[3].tool_errors == 1
  assert tokenizer.decode(found[0].token_ids) == "#12*7>84=84<eos>"
  written = [token for token, own in zip(found[0].token_ids, found[0].is_generated, strict=True) if not own]
  assert tokenizer.decode(written) == "84=", "what the calculator said does not train"


def test_the_calculator_runs_through(products):
  history = History()
  maxtext.train(load_config(**calculator_keys(products, num_batches=1)), callbacks=[history])
  [step] = history.figures
  assert step["mismatch_max"] < 1e-4
  assert step["turns"] >= 1


# Chat templates.


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize(
  ("style", "role"),
  [("chatml", "user"), ("chatml", "tool"), ("llama3", "tool"), ("gemma", "user"), ("mistral", "user"),
   ("mistral", "tool"), ("command", "user"), ("qwen3", "tool")],
)  # fmt: skip
@pytest.mark.parametrize("text", ["and the other", "", " \n the", "<|im_end|></s>"])
def test_a_message_continues_the_tokens_that_a_server_would_prefill(vocabulary, style, role, text):
  tokenizer = open_tokenizer(vocabulary, style)
  messages = [{"role": "user", "content": "the one"}, {"role": "assistant", "content": "the last"}]
  if style == "qwen3":
    messages[-1]["reasoning_content"] = "the answer"
  messages.append({"role": role, "content": text})
  whole = tokenizer.chat(messages, answer=True).tolist()
  continued = ChatContinuation(tokenizer, role)(text, last=whole[0])
  assert whole[-len(continued) :] == continued, "with the end of the turn, which the answer does not have"
  assert ChatContinuation(tokenizer, role)(text, last=continued[0]) == continued[1:]


@pytest.mark.parametrize(
  ("style", "role", "says"),
  [
    ("qwen3", "user", "changes earlier turns"),
    ("deepseek", "user", "changes earlier turns"),
    ("harmony", "user", "changes earlier turns"),
    ("plain", "user", "no special token"),
  ],
)
def test_a_template_that_changes_what_was_generated_is_refused(vocabulary, style, role, says):
  with pytest.raises(ConfigError, match=says):
    ChatContinuation(open_tokenizer(vocabulary, style, add_eos=False), role)


def test_a_conversation_by_a_template(converse, vocabulary):
  chat = {"use_chat_template": True, "tokenizer_path": str(vocabulary), "vocab_size": VOCAB_SIZE,
          "max_target_length": 200, "max_prefill_predict_length": 30, "max_turns": 3, "system_prompt": "the one",
          "chat_template": open_tokenizer(vocabulary, "chatml").chat_template}  # fmt: skip
  [found], prompts, tokenizer = converse("Names", ["the\n\n the"], **chat)
  assert found.turns == 2
  added = prompts[1][0][len(prompts[0][0]) :]
  text = tokenizer.vocabulary._conversations.decode(added, skip_special_tokens=False)
  assert text == ("the\n\n the</s><|im_end|>\n<|im_start|>user\n<|im_end|>1<|im_end|>\n<|im_start|>assistant\n"), (
    "the end of a document is no end of a turn"
  )
  special = tokenizer.vocabulary.encode("<|im_end|>", special=True)[0]
  assert added.count(special) == 2, "what an environment says is text"


# Runs.

TALK = {"rl_environment": "own_environments:Three", "reward_functions": [], "max_target_length": 24, "max_turns": 3,
        "stop_strings": ["="], "batch_size": 4, "num_generations": 4}  # fmt: skip


@pytest.mark.nightly
def test_a_policy_learns_from_an_environment(run, place):
  figures, _ = run(**TALK | {"batch_size": 10, "num_generations": 8}, num_batches=12)
  rewards = [step["reward_environment"] for step in figures]
  assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3]), rewards
  assert max(step["mismatch_max"] for step in figures) < 1e-4


def test_what_is_measured_of_conversations(run, place, tmp_path):
  own = {"reward_functions": ["own_rewards:constant"], "grain_eval_files": str(place / "tasks.jsonl")}
  figures, _ = run(**TALK | own, num_batches=2, num_test_batches=1)
  assert max(step["mismatch_max"] for step in figures) < 1e-4, "over the turns, in float32"
  assert {step["ratio_deviation"] for step in figures} == {0.0}
  assert min(step["turns"] for step in figures) > 1.2
  assert {step["tool_errors"] for step in figures} == {0.0}
  for step in figures:
    assert step["reward_own_rewards_constant"] == 1.0
    assert step["reward"] == pytest.approx(1.0 + step["reward_environment"])
  assert figures[-1]["eval_pass_rate"] == 1.0, "by the function"
  rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
  assert any("=" in row["text"] and row["end"] == "length" for row in rows), "the whole conversation"


def test_conversations_are_the_same_in_a_thread_and_after_a_restart(run, place):
  changes = TALK | {"num_batches": 3, "off_policy_steps": 1, "enable_checkpointing": True, "checkpoint_period": 1,
                    "async_checkpointing": False}  # fmt: skip
  inline, expected = run(**changes, run_name="inline")
  begun, _ = run(**changes, use_agentic_rollout=True, run_name="thread", callbacks=[StopAt(1)])
  resumed, state = run(**changes, use_agentic_rollout=True, run_name="thread")
  for name in ("loss", "grad_norm", "reward", "turns", "rollout_version"):
    assert [step[name] for step in begun + resumed] == [step[name] for step in inline], name
  for path, array in expected.params.items():
    np.testing.assert_array_equal(np.asarray(state.params[path]), np.asarray(array), err_msg=path)


def test_a_broken_environment_does_not_end_a_run(run, place):
  figures, _ = run(**TALK | {"rl_environment": "own_environments:NoReset"}, num_batches=2)
  assert [(step["tool_errors"], step["turns"], step["loss"]) for step in figures] == [(16.0, 0.0, 0.0)] * 2


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"rl_environment": "own_environments"}, "must be module:Class"),
    ({"rl_environment": "own_environments:None_"}, "rl_environment=own_environments:None_: AttributeError"),
    ({"max_turns": 0}, "max_turns"),
    ({"environment_timeout": 0}, "environment_timeout"),
  ],
)
def test_keys_that_do_not_fit_are_named(run, place, changes, says):
  with pytest.raises(ConfigError, match=says):
    run(**TALK | changes)
