"""The first days of those who come from elsewhere: every command of their page, typed in an empty folder, in order."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flags import flags
from tests.vocabularies import SENTENCES, hugging_face

PAGES = Path(__file__).parents[1] / "docs"
FILES = ("chat", "pairs", "tasks")


def blocks(page, language):
  return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path):
  """What the pages assume: a folder of weights, a corpus, and the rows and the reward that the page for TRL shows."""
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(hugging_face(tmp_path / "model"))
  for name, row in zip(FILES, blocks("coming-from-trl.md", "json")[0].splitlines(), strict=True):
    (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 60)
  (tmp_path / "rewards.py").write_text(blocks("coming-from-trl.md", "python")[0])
  (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": line * 30}) + "\n" for line in SENTENCES))
  return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["coming-from-trl.md", "coming-from-torchtitan.md", "coming-from-maxtext.md"])
def test_every_command_of_the_page_works(page, folder, capsys):
  environment = os.environ | flags() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
  failed = []
  for line in blocks(page, "sh")[0].splitlines():
    began = time.monotonic()
    done = subprocess.run(shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True, check=False)
    with capsys.disabled():
      print(f"{done.returncode} {time.monotonic() - began:6.1f} s  {line[:100]}")
    if done.returncode:
      failed.append((line, done.stderr[-2000:]))
  assert failed == []
  if page == "coming-from-trl.md":
    import transformers

    assert transformers.AutoModelForCausalLM.from_pretrained(folder / "aligned-hf").config.vocab_size == 300
