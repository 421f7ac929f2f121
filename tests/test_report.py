"""The report of a run: what is on the page, whatever stands in the run's files, and the page that follows a run."""

import http.client
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

from maxtext import ConfigError
from maxtext.cli.main import main
from maxtext.observe.downsample import MAX_POINTS, downsample
from maxtext.observe.report import Report, write_report
from maxtext.observe.report_server import ReportServer
from maxtext.observe.run_directory import RunDirectory
from maxtext.observe.run_files import MetricsFile

NODE = shutil.which("node")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\ud800"

FACTS = {
  "started": "2026-01-02 03:04:05 +0000",
  "command": ["/usr/bin/maxtext", "train", "small-llama", "run_name=two words"],
  "python": "3.11.7",
  "versions": {"jax": "0.10.2"},
  "hardware": {"devices": 256, "kind": "TPU v5p", "processes": 64},
  "parameters": 3_148_224,
}


def config(**values):
  return {key: {"value": value, "from": "command line"} for key, value in values.items()}


def row(step, **more):
  seconds = 30.0 if "started" in more else 0.5
  row = {"step": step, "loss": 8.0 - step / 10, "tokens": 1000.0, "step_time_seconds": seconds}
  return row | {"tokens_per_second": 1000 / seconds, "mfu": 0.2 / seconds} | more


def write_run(folder, rows, *, keys=None, facts=FACTS, samples=()):
  folder.mkdir(parents=True)
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "run.json").write_text(json.dumps(facts))
  (folder / "config.json").write_text(json.dumps(config(steps=40, model_name="tiny") if keys is None else keys))
  if samples:
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
  return folder


def plots(page):
  """The data in a page, as its script finds it: the first end tag ends the element."""
  return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)[1])


class Parsed(HTMLParser):
  """Tags with their attributes, and the text outside of scripts and styles."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.text, self._inside = [], "", ""
    self.feed(page)

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    self._inside = tag

  def handle_endtag(self, tag):
    self._inside = ""

  def handle_data(self, data):
    if self._inside not in ("script", "style"):
      self.text += data


def test_a_model_without_a_name_is_called_by_its_block(tmp_path):
  for name, shown in (("llama2-7b", "llama2-7b, 6 layers"), ("default", "mistral, 6 layers")):
    keys = config(model_name=name, decoder_block="mistral", num_decoder_layers=6)
    page = write_report([write_run(tmp_path / name, [row(1)], keys=keys)], tmp_path / "page.html").read_text()
    assert f"<td>{shown}</td>" in page


def test_the_facts_of_a_run_are_on_its_page(tmp_path):
  rows = [row(1, started=1.0), *(row(step, eval_loss=9 - step / 10) for step in range(2, 21))]
  rows += [row(21, started=2.0), *map(row, range(22, 31))]
  keys = config(steps=40, model_name="tiny", num_decoder_layers=6)
  text = Parsed(Report([write_run(tmp_path / "run", rows, keys=keys)]).page()).text
  for fact in (
    "maxtext train small-llama 'run_name=two words'",
    "tiny, 6 layers",
    "256 x TPU v5p, 64 processes",
    "python 3.11.7, jax 0.10.2",
    "2026-01-02 03:04:05 +0000, the last of 2 starts",
    "after step 20",
    "Step30of 40, about 5 s left at this speed",
    "Loss5.00007.9000 at first",
    "Evaluation loss7.0000best 7.0000 at step 20",
    "Parameters3.15 M3,148,224",
    "Tokens30 k30,000",
    "Time in steps74 s",
    "Step time500 msmedian",
    "Tokens/s2,000mean",
    "MFU40.0%mean",
  ):
    assert fact in text, fact


def test_the_first_step_after_a_start_is_left_out_of_speeds_and_marked(tmp_path):
  rows = [row(1, started=1.0), *map(row, range(2, 11)), row(11, started=2.0), *map(row, range(12, 21))]
  data = plots(Report([write_run(tmp_path / "run", rows)]).page())
  run = data["runs"][0]
  assert run["restarts"] == [11]
  assert run["series"]["tokens_per_second"]["x"] == [*range(2, 11), *range(12, 21)]
  assert run["series"]["loss"]["x"] == list(range(1, 21))
  assert sum(data["histogram"]["counts"][0]) == 18
  assert data["histogram"]["longest"] == 0.5


def test_train_and_evaluation_loss_share_a_plot_and_all_metrics_have_one(tmp_path):
  rows = [row(step, eval_loss=5.0, grad_norm=1.0, learning_rate=0.1, expert_load=1.5, accuracy=0.5) for step in (1, 2)]
  data = plots(Report([write_run(tmp_path / "run", rows)]).page())
  found = {plot["title"]: [line["metric"] for line in plot["lines"]] for plot in data["plots"]}
  assert found == {
    "Loss": ["loss", "eval_loss"],
    "Gradient norm": ["grad_norm"],
    "Learning rate": ["learning_rate"],
    "Tokens per second": ["tokens_per_second"],
    "MFU": ["mfu"],
    "Expert load (1 is even)": ["expert_load"],
    "accuracy": ["accuracy"],
  }


def test_hostile_strings_stay_text(tmp_path):
  """In names, keys, values, metrics, versions and samples: no element and no attribute comes of them."""
  rows = [row(1, **{HOSTILE: 1.0}), row(2, **{HOSTILE: 2.0})]
  facts = FACTS | {"command": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "started": HOSTILE, "python": HOSTILE}
  facts["hardware"] = {"devices": HOSTILE, "kind": HOSTILE, "processes": HOSTILE}
  samples = [{"step": 2, "prompt": HOSTILE, "text": HOSTILE}]
  keys = {HOSTILE: {"value": HOSTILE, "from": HOSTILE}}
  name = HOSTILE.replace("/", "").replace("\ud800", "")
  hostile = write_run(tmp_path / name, rows, keys=keys | config(model_name=HOSTILE), facts=facts, samples=samples)
  plain = write_run(tmp_path / "plain", [row(1)], keys=config(**{"model_name": "tiny"}))
  for folders in ([hostile], [hostile, plain]):
    page = Report(folders).page()
    parsed = Parsed(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not [tag for tag, _ in parsed.tags if tag in ("img", "iframe", "object", "a")]
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert "</script><script>alert(1)</script><img src=x onerror=alert(2)>" in parsed.text
    assert HOSTILE in plots(page)["runs"][0]["series"]
    page.encode()


def test_a_page_loads_nothing_and_runs_its_own_script_alone(tmp_path):
  folder = write_run(tmp_path / "run", [row(1)])
  for live in (False, True):
    page = Report([folder]).page(live=live)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/]+=*'(;|$)", policy)
    assert ("connect-src" in policy) == live
    addresses = set(re.findall(r"https?://[^\s\"'<)]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a format, which nothing is loaded from"


def test_secrets_stay_out_of_the_page(tmp_path):
  """Also of a run whose record has them."""
  facts = FACTS | {"command": ["maxtext", "train", "hf_access_token=hunter2", "--hf-access-token", "hunter2"]}
  keys = config(hf_access_token="hunter2", steps=3)
  page = Report([write_run(tmp_path / "run", [row(1)], keys=keys, facts=facts)]).page()
  assert "hunter2" not in page
  assert "hf_access_token=(redacted)" in page


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 100_000])
def test_downsampling_keeps_extremes(count):
  steps = list(range(1, count + 1))
  values = [math.sin(step / 50) for step in steps]
  for step, value in ((count // 3, 100.0), (count // 2, -100.0)):
    if count > 2:
      values[step] = value
  points = downsample(steps, values)
  assert len(points.steps) == min(count, len(points.steps)) <= MAX_POINTS
  assert list(points.steps) == sorted(set(points.steps))
  assert all(values[step - 1] == value for step, value in zip(points.steps, points.values, strict=True))
  if count:
    assert (min(points.values), max(points.values)) == (min(values), max(values))
    assert (points.steps[0], points.steps[-1]) == (1, count)
  assert bool(points.mean_steps) == (count > MAX_POINTS)
  if points.mean_steps:
    assert sum(points.mean_values) / len(points.mean_values) == pytest.approx(sum(values) / count, abs=0.1)


def test_a_long_run_makes_a_small_page_that_says_so(tmp_path):
  rows = [row(step) for step in range(1, 20_001)]
  rows[12_344]["loss"], rows[5_000]["loss"] = 1e6, -1e6
  page = Report([write_run(tmp_path / "run", rows)]).page()
  assert len(page) < 600_000
  loss = plots(page)["runs"][0]["series"]["loss"]
  assert len(loss["x"]) <= MAX_POINTS
  assert (12_345, 1e6) in zip(loss["x"], loss["y"], strict=True)
  assert (5_001, -1e6) in zip(loss["x"], loss["y"], strict=True)
  assert "Lines of more than 2,000 points show the least and the greatest value" in page


def test_values_that_are_no_numbers_do_not_break_a_page(tmp_path):
  folder = write_run(tmp_path / "run", [])
  lines = [
    '{"step": 1, "loss": 5.0, "grad_norm": 1e308, "step_time_seconds": 1e308}',
    '{"step": 2, "loss": NaN, "grad_norm": -1e308, "step_time_seconds": 0.5}',
    '{"step": 3, "loss": Infinity}',
    '{"step": 4, "loss": null, "note": "text", "flag": true}',
    '{"step": 5, "loss": 1' + "0" * 400 + "}",
    '{"step": 1' + "0" * 400 + ', "loss": 1.0}',
    '{"step": -6, "loss": 1.0}',
    '{"step": "7", "loss": 1.0}',
    "[" * 10_000,
    "\x00",
    '{"step": 6, "loss": 4.0}',
    '{"step": 7, "lo',
  ]
  (folder / "metrics.jsonl").write_text("\n".join(lines))
  page = Report([folder]).page()
  loss = plots(page)["runs"][0]["series"]["loss"]
  assert (loss["x"], loss["y"], loss["bad"]) == ([1, 6], [5.0, 4.0], [2, 3, 4, 5])
  assert "the loss was not a finite number at 4 steps, first at step 2." in page


@pytest.mark.parametrize("missing", ["run.json", "config.json", "metrics.jsonl", "all of metrics.jsonl"])
def test_what_a_folder_lacks_the_page_lacks(missing, tmp_path):
  folder = write_run(tmp_path / "run", [row(1)])
  if missing.startswith("all"):
    (folder / "metrics.jsonl").write_text("")
  else:
    (folder / missing).unlink()
  page = write_report([folder], folder / "report.html").read_text()
  assert ("run has not finished a step;" in page) == ("metrics" in missing)
  (folder / "run.json").write_text('{"versions": [], "command": "x", "hardware": 3, "parameters": "many"')
  (folder / "config.json").write_text('["steps"]')
  assert "<h1>run</h1>" in Report([folder]).page()


def test_other_folders_are_a_mistake(tmp_path):
  with pytest.raises(ConfigError, match="missing is not a run's folder: it does not exist"):
    Report([tmp_path / "missing"])
  with pytest.raises(ConfigError, match=r"is not a run's folder: it has no metrics.jsonl"):
    Report([tmp_path])


def test_a_comparison_begins_with_the_keys_that_differ(tmp_path):
  a = write_run(tmp_path / "a" / "run", [row(1)], keys=config(steps=4, learning_rate=0.1, run_name="a", emb_dim=1))
  b = write_run(tmp_path / "b" / "run", [row(1)], keys=config(steps=4, learning_rate=0.2, run_name="b", emb_dim=2))
  c = write_run(tmp_path / "c" / "other", [row(1)], facts=FACTS | {"versions": {"jax": "9"}}, keys={})
  page = Report([a, b]).page()
  assert [run["name"] for run in plots(page)["runs"]] == ["a/run", "b/run"]
  rows = re.findall(r'<tr><th scope="row">(\w+)</th>', page.split("<h2>Runs</h2>")[0])
  assert rows == ["learning_rate"], "neither equal keys, nor names, nor what follows from others"
  assert page.index("<h2>Differences</h2>") < page.index("<h2>Runs</h2>") < page.index('id="plots"')
  page = Report([a, c]).page()
  assert '<th scope="row">version of jax</th><td>0.10.2</td><td>9</td>' in page
  assert "Without a configuration: other." in page
  assert "The configurations are equal." in Report([a, a]).page()


def test_metrics_are_read_as_they_grow(tmp_path):
  """A step that is written again replaces later ones, and a file that was cut and grew again is read from its start."""
  path = tmp_path / "metrics.jsonl"
  lines = [json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(1, 11)]
  path.write_text("".join(lines[:3]) + lines[3][:9])
  metrics = MetricsFile(path)
  assert metrics.update()
  assert metrics.last_step == 3
  assert not metrics.update()
  path.write_text("".join(lines[:5]))
  assert metrics.update()
  assert metrics.series["loss"].steps == [1, 2, 3, 4, 5]
  path.write_text("".join(lines[:5]) + '{"step": 3, "loss": 9.0}\n')
  assert metrics.update()
  assert metrics.series["loss"].values == [1.0, 2.0, 9.0]
  assert metrics.starts == [1, 3]
  other = [line.replace(".0", ".5") for line in lines]
  path.write_text("".join(lines[:2] + other[2:]))
  assert metrics.update()
  assert metrics.series["loss"].values == [1.0, 2.0, *(step + 0.5 for step in range(3, 11))]
  path.unlink()
  with pytest.raises(FileNotFoundError):
    metrics.update()
  assert metrics.last_step == 10


@contextmanager
def served(*folders):
  server = ReportServer(folders)
  thread = threading.Thread(target=server.serve)
  thread.start()
  try:
    yield int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", server.url)[1])
  finally:
    server.close()
    thread.join(10)
    assert not thread.is_alive()


def ask(port, path="/data.json", method="GET", host=None, **headers):
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  connection.putrequest(method, path, skip_host=True)
  for value in [host or f"127.0.0.1:{port}"] if not isinstance(host, list) else host:
    connection.putheader("Host", value)
  for name, value in headers.items():
    connection.putheader(name.replace("_", "-"), value)
  connection.endheaders()
  answer = connection.getresponse()
  found = answer.status, answer.read(), answer.headers
  connection.close()
  return found


def wait_for(port, found, expected):
  """Asks until `found` of the data is what is expected: the server reads files only now and then."""
  deadline = time.monotonic() + 20
  while True:
    status, body, headers = ask(port)
    assert status == 200
    data = json.loads(body)
    if found(data) == expected or time.monotonic() > deadline:
      assert found(data) == expected
      return data, headers["ETag"]
    time.sleep(0.05)


def losses(data):
  return data["runs"][0]["series"].get("loss", {}).get("y")


def test_a_live_page_follows_its_run(tmp_path):
  folder = write_run(tmp_path / "run", [])
  with served(folder) as port:
    status, page, headers = ask(port, "/")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert plots(page.decode())["live"] is True
    wait_for(port, losses, None)
    with open(folder / "metrics.jsonl", "a") as file:
      file.write(json.dumps(row(1)) + '\n{"step": 2, "lo')
      file.flush()
      wait_for(port, losses, [7.9])
      file.write('ss": NaN}\n' + json.dumps(row(3)) + "\n")
    wait_for(port, losses, [7.9, 7.7])
    (folder / "config.json").write_text('{"steps": {"val')  # half written: the last one stays
    (folder / "samples.jsonl").write_text(json.dumps({"step": 3, "prompt": "Once ", "text": "<i>upon"}) + "\n")
    text = '<span class="prompt">Once </span>&lt;i&gt;upon'
    data, tag = wait_for(port, lambda data: text in data["html"]["samples"], True)
    assert "of 40" in data["html"]["summary"]
    assert ask(port, If_None_Match=tag)[:2] == (304, b"")
    shutil.rmtree(folder)
    removed = "run: The folder has been removed. This is what was read before."
    data, _ = wait_for(port, lambda data: removed in data["html"]["problems"], True)
    assert losses(data) == [7.9, 7.7]
    assert ask(port, If_None_Match=tag)[0] == 200
    write_run(folder, [row(1)])
    data, _ = wait_for(port, losses, [7.9])
    assert removed not in data["html"]["problems"]


def test_a_live_page_is_for_this_machine_and_has_two_addresses(tmp_path):
  with served(write_run(tmp_path / "run", [row(1)])) as port:
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1:9", f"[::1]:{port}"):  # other ports are those of tunnels
      assert ask(port, "/", host=host)[0] == 200, host
    for host in (
      "evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "user@localhost",
      "0.0.0.0", "[", [], ["localhost", "evil.example"],
    ):  # fmt: skip
      for path in ("/", "/data.json"):
        status, body, _ = ask(port, path, host=host)
        assert (status, body) == (403, b"This server answers to localhost alone.\n"), host
    for path in ("/metrics.jsonl", "/../run/run.json", "/?x", "/data.json/", "/%2e%2e/"):
      assert ask(port, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
      assert ask(port, "/", method)[0] == 501, method
    status, body, headers = ask(port, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_ctrl_c_ends_the_server(tmp_path):
  folder = write_run(tmp_path / "run", [row(1)])
  command = [sys.executable, "-m", "maxtext", "report", "--serve", "--port", "0", str(folder)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    port = int(re.match(r"http://127\.0\.0\.1:(\d+)/ ", process.stdout.readline())[1])
    assert ask(port, "/")[0] == 200
    process.send_signal(signal.SIGINT)
    try:
      _, errors = process.communicate(timeout=60)
    finally:
      process.kill()
  assert (process.returncode, errors) == (0, "")


def test_mistakes_of_the_command(tmp_path, capsys):
  folder = str(write_run(tmp_path / "run", [row(1)]))
  for words, message in (
    (["--port", "80"], "--port goes with --serve."),
    (["--serve", "--out", "x.html"], "--out writes a file and --serve serves a page: choose one."),
    (["--serve", "--port", "99999"], "--port 99999 cannot be used: it is not between 0 and 65535."),
    (["--out", str(tmp_path / "none" / "x.html")], "x.html cannot be written: No such file or directory."),
  ):
    assert main(["report", folder, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_records_its_hardware_and_parameters(tmp_path):
  run = RunDirectory.of(str(tmp_path), "run")
  run.make()
  run.begin(None, parameters=5)
  facts = json.loads((tmp_path / "run" / "run.json").read_text())
  assert facts["parameters"] == 5
  assert facts["hardware"]["kind"] == "cpu"
  assert facts["hardware"]["processes"] == 1


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_counts_right():
  """The functions of the script that need no page; node also refuses a script that it cannot parse."""
  script = Path(sys.modules["maxtext.observe.report"].__file__).with_name("report.js")
  program = f"""
    const f = require({json.dumps(str(script))});
    const flat = f.smooth([1, 2, 3, 4], [5, 5, 5, 5], 10), jump = f.smooth([1, 2, 1000], [0, 0, 9], 10);
    const steps = [...Array(101).keys()], falling = f.smooth(steps, steps.map(step => 100 - step), 10);
    console.log(JSON.stringify({{
      flat, jump: jump[2], falling: falling[50], none_to_smooth: f.smooth([], [], 10),
      nearest: [f.nearest([], 3), f.nearest([1, 5, 9], 0), f.nearest([1, 5, 9], 6), f.nearest([1, 5, 9], 99)],
      linear: f.ticks(0, 10, false, 5), log: f.ticks(0.5, 2000, true, 5), close: f.ticks(1.1, 1.9, true, 4),
      one: f.range([3], false, 0), none: f.range([], true, 0), positive: f.range([-1, 0, 2, 8], true, 0),
      scale: [f.scale([1, 100], 0, 10, true)(10), f.scale([0, 4], 0, 8, false)(1)],
      text: [f.number(0), f.number(5.902233600616455), f.number(1234567), f.number(0.00012345), f.short(100000)],
      huge: [false, true].map(log => {{
        const ends = f.range([1, 1e308, -1e308].map(f.clamp), log, 0.03);
        return ends.every(Number.isFinite) && f.ticks(...ends, log, 5).length > 1 &&
          Number.isFinite(f.scale(ends, 0, 10, log)(2));
      }}),
      single: f.ticks(...f.range([f.clamp(1e308)], true, 0), true, 5).length,
      width: [f.smoothingWidth(0, 1000), f.smoothingWidth(100, 1000)],
    }}));
  """
  found = json.loads(
    subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True, timeout=60).stdout
  )
  assert {name: value if name == "text" else pytest.approx(value) for name, value in found.items()} == {
    "flat": [5, 5, 5, 5],
    "jump": 9,
    "falling": 50,
    "none_to_smooth": [],
    "nearest": [-1, 0, 1, 2],
    "linear": [0, 2, 4, 6, 8, 10],
    "log": [1, 10, 100, 1000],
    "close": [1.2, 1.4, 1.6, 1.8],
    "one": [2.7, 3.3],
    "none": [1, 10],
    "positive": [2, 8],
    "scale": [5, 2],
    "text": ["0", "5.9022", "1.235e6", "1.234e-4", "100k"],
    "huge": [True, True],
    "single": 3,
    "width": [0, 200],
  }
