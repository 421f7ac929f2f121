"""Every kind of vocabulary, made here and read as a run reads it."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import tokenizers

from maxtext import ConfigError, MaxTextConfig, load_config
from maxtext.data.tokenizers import Tokenizer, load_tokenizer
from tests import vocabularies
from tests.vocabularies import CHAT_TEMPLATE, SENTENCES

KINDS = {
  "huggingface": vocabularies.hugging_face,
  "sentencepiece": vocabularies.sentence_piece,
  "tiktoken": vocabularies.tiktoken,
}
TALK = [{"role": "user", "content": " 2 + 2? "}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in KINDS.items()}


def open_kind(made, kind, **changes) -> Tokenizer:
  """`MaxTextConfig` itself, so that keys of features that runs do not have yet can be tried."""
  values = {"tokenizer_type": kind, "tokenizer_path": str(made[kind]), "vocab_size": 600}
  return load_tokenizer(MaxTextConfig(**(values | changes)))


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_with_what_was_asked_around_it(made, kind):
  tokenizer = open_kind(made, kind)
  bare = open_kind(made, kind, add_bos=False, add_eos=False)
  for text in SENTENCES[:2]:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert (tokens[0], tokens[-1]) == (tokenizer.bos, tokenizer.eos)
    np.testing.assert_array_equal(tokens[1:-1], bare.encode(text))
    assert tokenizer.decode(tokens) == bare.decode(bare.encode(text)) == text
    assert 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size
  assert len({tokenizer.bos, tokenizer.eos, tokenizer.pad}) == 3
  assert bare.encode("").tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_cannot_end_itself(made, kind):
  tokenizer = open_kind(made, kind, add_bos=False, add_eos=False)
  for token in (tokenizer.bos, tokenizer.eos):
    text = f"the {tokenizer.vocabulary.name(token)} the"
    assert token not in tokenizer.encode(text)
    assert token in tokenizer.vocabulary.encode(text, special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_know_every_token(made, kind):
  tokenizer = open_kind(made, kind, add_bos=False, add_eos=False)
  known = tokenizer.for_grammars(640)
  assert (known.vocab_size, known.eos_token) == (640, tokenizer.eos)
  for text in (*SENTENCES[:3], "\u00e9\u2192"):
    tokens = tokenizer.encode(text).tolist()
    assert known.decode_bytes(tokens).decode().lstrip() == tokenizer.decode(tokens)  # pieces begin with a space
  assert all(known.is_special_token(token) for token in (tokenizer.bos, tokenizer.eos))


def test_grammars_refuse_tokens_without_bytes(tmp_path):
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="</s>"))
  words.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  tokenizer = open_kind({"huggingface": tmp_path}, "huggingface", add_bos=False)
  with pytest.raises(ConfigError, match="need tokens whose bytes are known: can't determine decoder type"):
    tokenizer.for_grammars(600)


@pytest.mark.parametrize("kind", KINDS)
def test_identity_is_what_decides_the_tokens(made, kind, tmp_path):
  tokenizer = open_kind(made, kind)
  path = made[kind]
  shutil.copytree(path if path.is_dir() else path.parent, tmp_path / "same")
  assert open_kind(made, kind, tokenizer_path=str(tmp_path / "same")).identity == tokenizer.identity
  assert tokenizer.identity["vocab_size"] == tokenizer.vocab_size
  assert open_kind(made, kind, add_eos=False).identity != tokenizer.identity
  other = KINDS[kind](tmp_path / "other", size=tokenizer.vocab_size - {"tiktoken": 257}.get(kind, 1))
  changed = open_kind(made, kind, tokenizer_path=str(other)).identity
  assert changed["sha256"] != tokenizer.identity["sha256"]


def test_hugging_face_agrees_with_its_own_library(made):
  transformers = pytest.importorskip("transformers")
  theirs = transformers.AutoTokenizer.from_pretrained(str(made["huggingface"]))
  ours = open_kind(made, "huggingface")
  for text in SENTENCES[:3]:
    assert ours.encode(text)[1:-1].tolist() == theirs.encode(text, add_special_tokens=False, truncation=False)
  for answer in (False, True):
    text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=answer)
    assert ours.render(TALK, answer=answer) == text
    tokens = ours.chat(TALK, answer=answer)
    assert tokens.tolist() == theirs.encode(text, add_special_tokens=False)
    assert tokens.tolist().count(ours.bos) == 1
    assert tokens.tolist().count(ours.eos) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_template_of_ones_own(made, kind, tmp_path):
  (tmp_path / "mine.jinja").write_text(CHAT_TEMPLATE)
  by_path = open_kind(made, kind, chat_template_path=str(tmp_path / "mine.jinja"))
  by_value = open_kind(made, kind, chat_template=CHAT_TEMPLATE)
  tokens = by_path.chat(TALK)
  np.testing.assert_array_equal(tokens, by_value.chat(TALK))
  assert tokens[0] == by_path.bos
  assert tokens.tolist().count(by_path.eos) == 2
  assert "2 + 2?" in by_path.decode(tokens)
  other = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}"
  assert open_kind(made, kind, chat_template=other).render(TALK) == json.dumps(TALK[1])
  with pytest.raises(ConfigError, match="say the same thing twice"):
    open_kind(made, kind, chat_template="x", chat_template_path="y")
  with pytest.raises(ConfigError, match="refuses this conversation: roles must alternate"):
    open_kind(made, kind, chat_template="{{ raise_exception('roles must alternate') }}").render(TALK)
  with pytest.raises(ConfigError, match="The chat template refuses"):  # a template is data from others
    open_kind(made, kind, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}").render(TALK)


def test_mistakes_are_named(made, tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "text").write_text("not a vocabulary")
  text = str(tmp_path / "text")
  for changes, message in (
    ({"vocab_size": 299}, r"has 300 tokens, 1 more than vocab_size=299: write vocab_size=300"),
    ({"tokenizer_path": None}, "tokenizer_path is not set"),
    ({"tokenizer_path": "./nowhere/at/all"}, r"tokenizer_path=\./nowhere/at/all is no file and no folder"),
    ({"tokenizer_path": str(tmp_path / "empty")}, r"empty holds no tokenizer\.json, which tokenizer_type=huggingface"),
    ({"tokenizer_path": text}, r"text is not a tokenizer\.json of Hugging Face: .* \(sentencepiece, hugg"),
    ({"tokenizer_path": text, "tokenizer_type": "sentencepiece"}, "text is not a SentencePiece model"),
    ({"tokenizer_path": text, "tokenizer_type": "tiktoken"}, "text is not a tiktoken file"),
    ({"tokenizer_path": str(made["huggingface"] / "tokenizer.json"), "chat_template_path": "no"}, "no cannot be read"),
  ):
    with pytest.raises(ConfigError, match=message):
      open_kind(made, "huggingface", **changes)
  (tmp_path / "tokenizer.json").write_bytes((made["huggingface"] / "tokenizer.json").read_bytes())
  alone = {"tokenizer_path": str(tmp_path / "tokenizer.json")}
  with pytest.raises(ConfigError, match="has no beginning-of-sequence token: write add_bos=false"):
    open_kind(made, "huggingface", **alone)
  with pytest.raises(ConfigError, match="has no end-of-sequence token: write add_eos=false"):
    open_kind(made, "huggingface", add_bos=False, **alone)
  tokenizer = open_kind(made, "huggingface", add_bos=False, add_eos=False, **alone)
  assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (None, None, 0)
  with pytest.raises(ConfigError, match="has no chat template"):
    tokenizer.chat(TALK)


def test_keys_without_effect_are_refused():
  for key, value, without in (
    ("tokenizer_path", "x", "dataset_type=synthetic"),
    ("add_bos", False, "dataset_type=synthetic"),
    ("chat_template", "x", "use_chat_template=true"),
  ):
    with pytest.raises(ConfigError, match=f"{key}={value} is refused: it has no effect .*{without}"):
      load_config(dataset_type="synthetic", **{key: value})


def test_a_vocabulary_by_name_with_its_token(made, tmp_path):
  """A server that speaks as much of the hub's language as a download needs, and asks for a token."""
  asked: list[str | None] = []

  class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.headers.get("Authorization"))
      name = self.path.rsplit("/", 1)[-1].split("?")[0]
      if asked[-1] != "Bearer sesame":
        return self.answer(b"", 401)
      if "/api/models/" in self.path:
        sizes = {file.name: file.stat().st_size for file in made["huggingface"].iterdir()} | {"model.safetensors": 9}
        tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
        known = tree if "/tree/" in self.path else {"sha": "0" * 40, "id": "some/name"}
        return self.answer(json.dumps(known).encode(), type="application/json")
      return self.answer((made["huggingface"] / name).read_bytes())

    do_HEAD = do_GET  # noqa: N815 - the library's own name

    def answer(self, body, status=200, type="text/plain"):
      self.send_response(status)
      headers = {
        "X-Repo-Commit": "0" * 40,
        "ETag": f'"{len(body)}"',
        "Content-Type": type,
        "Content-Length": str(len(body)),
      }
      for header in headers.items():
        self.send_header(*header)
      self.end_headers()
      if self.command == "GET":
        self.wfile.write(body)

    def log_message(self, *args):
      pass

  script = (
    "from maxtext import MaxTextConfig; from maxtext.data.tokenizers import load_tokenizer; import sys\n"
    "try: print(load_tokenizer(MaxTextConfig(tokenizer_type='huggingface', tokenizer_path='some/name',"
    " hf_access_token=sys.argv[1] or None)).identity['sha256'])\n"
    "except ValueError as error: print(error)"
  )
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | hub

    def load(token):
      done = subprocess.run([sys.executable, "-c", script, token], env=env, capture_output=True, text=True, timeout=60)
      assert done.returncode == 0, done.stderr
      return done.stdout.strip()

    refused = load("")
    found = load("sesame")
    server.shutdown()
  assert "tokenizer_path=some/name is no file or folder here" in refused
  assert "A gated name needs hf_access_token." in refused
  assert found == open_kind(made, "huggingface").identity["sha256"]
  assert not list(tmp_path.rglob("model.safetensors")), "weights are left where they are"
