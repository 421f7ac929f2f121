"""A run's folder is all that anyone needs: its tokenizer is in it, and goes out with its weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
from etils import epath

from maxtext.checkpoint.tokenizer import copy_tokenizer, find_tokenizer, keep_tokenizer, kind_of, open_tokenizer
from maxtext.cli.main import main
from maxtext.configs import ConfigError
from maxtext.configs.types import MaxTextConfig, TokenizerType
from maxtext.data.options import data_options, tokenizer_options
from maxtext.data.tokenizers import load_tokenizer
from maxtext.weights.tokenizer_files import write_tokenizer
from tests import vocabularies
from tests.support import TINY

TEXTS = [
  "", "a", " a", "  two  spaces ", "The quick brown fox\n\njumps\tover", "naïve café ①ﬁ 漢字 😀\u200b",
  "a\u3000b e\u0301", "def double(x):\n    return x + x", "12345 1984", "the the  qu ox", "don't I'LL we've",
  "\x00\x01",
]  # fmt: skip


def pieces(folder, **settings):
  """A SentencePiece model of another kind than those of the shared vocabularies."""
  folder.mkdir()
  (folder / "text").write_text("\n".join(vocabularies.SENTENCES))
  sentencepiece.SentencePieceTrainer.train(
    input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=350, byte_fallback=True,
    hard_vocab_limit=False, minloglevel=2, **settings,
  )  # fmt: skip
  return folder / "tokenizer.model"


MADE = {
  "huggingface": vocabularies.hugging_face,
  "tiktoken": vocabularies.tiktoken,
  "sentencepiece": vocabularies.sentence_piece,
  "sentencepiece, unigram": lambda folder: pieces(folder, model_type="unigram", user_defined_symbols=["<mark>"]),
  "sentencepiece, every space": lambda folder: pieces(
    folder, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
  ),
  "sentencepiece, no first space": lambda folder: pieces(folder, model_type="bpe", add_dummy_prefix=False),
}


def keys(made, kind, folder, **changes):
  named = {"tokenizer_path": str(made(folder)), "tokenizer_type": kind.split(",")[0], "dataset_type": "grain"}
  return MaxTextConfig(**(named | changes))


@pytest.mark.parametrize("kind", MADE)
def test_a_copy_makes_the_same_tokens_and_so_does_transformers(kind, tmp_path):
  """What is kept is found by its content; what goes out is read by AutoTokenizer, with the run's first token."""
  transformers = pytest.importorskip("transformers", reason="extra hf")
  config = keys(MADE[kind], kind, tmp_path / "source")
  tokenizer = replace(load_tokenizer(tokenizer_options(config)), add_eos=False)
  assert keep_tokenizer(data_options(config), config.load_parameters_path, str(tmp_path / "run")) is None
  kept, out = tmp_path / "run" / "tokenizer", tmp_path / "out"
  assert kind_of(find_tokenizer(str(kept))) is config.tokenizer_type
  out.mkdir()
  write_tokenizer(tokenizer, out)
  (out / "config.json").write_text(json.dumps({"model_type": "llama"}))  # whose class would split text its own way
  shutil.rmtree(tmp_path / "source")
  with open_tokenizer(data_options(MaxTextConfig(add_eos=False)), str(kept)) as copy:
    assert copy.identity == tokenizer.identity
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  for text in TEXTS:
    expected = tokenizer.encode(text).tolist()
    assert copy.encode(text).tolist() == expected
    assert theirs.encode(text) == expected, text
    assert theirs.decode(expected, skip_special_tokens=True) == tokenizer.decode(expected)
  names = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.vocabulary.pad}
  assert {name: getattr(theirs, name) for name in names} == names


def test_a_template_in_a_file_is_kept(tmp_path):
  template = tmp_path / "chat.jinja"
  template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
  changes = {"chat_template_path": str(template), "use_chat_template": True}
  config = keys(vocabularies.sentence_piece, "sentencepiece", tmp_path / "source", **changes)
  assert keep_tokenizer(data_options(config), config.load_parameters_path, str(tmp_path / "run")) is None
  template.unlink()
  with open_tokenizer(data_options(MaxTextConfig()), str(tmp_path / "run" / "tokenizer")) as copy:
    assert copy.render([{"role": "user", "content": "hello"}]) == "[hello]"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model"])
def test_links_out_of_a_folder_are_not_followed(name, tmp_path):
  folder, secret = tmp_path / "folder", tmp_path / "secret"
  vocabularies.sentence_piece(folder)
  secret.write_text("secret")
  (folder / name).unlink(missing_ok=True)
  (folder / name).symlink_to(secret)
  with (
    pytest.raises(ConfigError, match=f"'{name}', which leads out"),
    open_tokenizer(data_options(MaxTextConfig()), str(folder)),
  ):
    pass
  with pytest.raises(ConfigError, match=f"'{name}', which leads out"):
    copy_tokenizer(str(folder), epath.Path(tmp_path))
  assert not (tmp_path / "tokenizer" / name).exists()


def test_a_tokenizer_that_training_does_not_read_ends_no_run(tmp_path):
  config = MaxTextConfig(dataset_type="grain", grain_train_files="elsewhere", tokenizer_path="nowhere")
  assert "tokenizer_path=nowhere is no file and no folder" in keep_tokenizer(
    data_options(config), config.load_parameters_path, str(tmp_path / "run")
  )
  config = keys(vocabularies.sentence_piece, "sentencepiece", tmp_path / "source")
  (tmp_path / "run").write_text("no folder can be made under a file")
  assert "run" in keep_tokenizer(data_options(config), config.load_parameters_path, str(tmp_path / "run"))
  assert keep_tokenizer(data_options(MaxTextConfig(dataset_type="synthetic")), "", str(tmp_path / "run")) is None


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
  """A run of two steps, begun where its tokenizer and corpus are named by relative paths, and then moved from there."""
  folder = tmp_path_factory.mktemp("begun")
  (folder / "text").mkdir()
  for number in range(20):
    (folder / "text" / f"{number}.txt").write_text("the cat sat on the mat. " * 8)
  vocabularies.sentence_piece(folder / "vocabulary")
  words = {
    "vocab_size": 400, "max_target_length": 64, "per_device_batch_size": 1, "run_name": "cat", "steps": 2,
    "dataset_type": "grain", "grain_train_files": "corpus", "grain_worker_count": 0, "enable_checkpointing": True,
    "async_checkpointing": False, "enable_tensorboard": False, "base_output_directory": "runs",
    "tokenizer_path": "vocabulary",
  }  # fmt: skip
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    prepare = ["--from", "text", "--to", "corpus", "--workers", "1", "tokenizer_path=vocabulary", "vocab_size=400"]
    assert main(["data", "prepare", *prepare]) == 0
    assert main(["train", *(f"{key}={value}" for key, value in (TINY | words).items())]) == 0
  target = tmp_path_factory.mktemp("moved") / "elsewhere"
  shutil.move(folder / "runs" / "cat", target)
  shutil.rmtree(folder)
  return target


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
  """Another working folder."""
  monkeypatch.chdir(tmp_path)


DECODE = ("prompt=the cat", "--max-tokens", "2", "max_prefill_predict_length=24", "jax_cache_dir=")


def test_a_moved_run_answers_from_another_folder(moved, nowhere, capsys):
  assert main(["decode", str(moved), *DECODE]) == 0
  assert capsys.readouterr().out.startswith("the cat")


def test_a_tokenizer_that_is_given_wins(moved, nowhere, capsys):
  assert main(["decode", str(moved), *DECODE, "tokenizer_path=missing"]) == 2
  assert "tokenizer_path=missing is no file" in capsys.readouterr().err


def test_a_moved_run_goes_out_with_its_tokenizer(moved, nowhere):
  """From the run, from a step of it, and from its parameters alone; the ends of texts stand in config.json."""
  from transformers import AutoTokenizer

  expected = vocabularies.sentence_piece(Path("again"))
  ours = load_tokenizer(tokenizer_options(MaxTextConfig(tokenizer_path=str(expected), add_eos=False)))
  assert main(["checkpoint", "export-params", str(moved), "params"]) == 0
  for source in (moved, moved / "checkpoints" / "2", Path("params")):
    out = Path(f"hf-{source.name}")
    assert main(["convert", "to-hf", str(source), str(out)]) == 0
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.encode("the cat sat") == ours.encode("the cat sat").tolist()
    assert {"bos_token_id": 1, "eos_token_id": 2}.items() <= json.loads((out / "config.json").read_text()).items()


def test_what_went_out_answers_and_is_trained_on_without_a_key(moved, nowhere, capsys):
  """The folder brings sizes, weights and tokenizer; a run that starts from it keeps the tokenizer in turn."""
  assert main(["convert", "to-hf", str(moved), "hf"]) == 0
  capsys.readouterr()
  for source in (str(moved), "hf"):
    assert main(["decode", source, *DECODE, "dtype=float32", "max_target_length=64"]) == 0
  ours, theirs = capsys.readouterr().out.splitlines()
  assert theirs == ours
  words = ["dataset_type=synthetic", "steps=1", "per_device_batch_size=1", "max_target_length=16", "run_name=again",
           "enable_checkpointing=false", "jax_cache_dir=", "enable_tensorboard=false"]  # fmt: skip
  assert main(["train", "hf", *words]) == 0
  assert "starts with the parameters of hf" in capsys.readouterr().out
  recorded = json.loads(Path("runs/again/config.json").read_text())["base_emb_dim"]
  assert recorded == {"value": 48, "from": "hf/config.json"}
  assert Path("runs/again/tokenizer/tokenizer.json").exists()


def test_the_kind_of_a_vocabulary_is_known_by_its_content(tmp_path):
  for kind in ("tiktoken", "sentencepiece", "huggingface"):
    folder = tmp_path / kind
    MADE[kind](folder)
    assert kind_of(find_tokenizer(str(folder))) is TokenizerType(kind)
  assert find_tokenizer(str(tmp_path)) is None
