"""Sounds become what transformers' feature extractor makes of them; files that are none become errors."""

import io
import struct
import types

import numpy as np
import pytest
import soundfile

from maxtext.media.audio import MelSounds, SoundLimits, load_sound, resample
from maxtext.media.processed import FeatureText
from maxtext.media.sources import MediaError

RATE = 16_000
SOUNDS = MelSounds(FeatureText("<|audio_pad|>"))
LENGTHS = [201, 320, 799, 1_600, 15_999, 16_000, 16_001, 31_999, 33_300, 80_123]


def voice(samples, seed=0):
  """Tones that glide, loud and silent by turns, over a little noise."""
  time = np.arange(samples) / RATE
  tones = sum(np.sin(2 * np.pi * (f * time + 40 * time**2)) / f**0.3 for f in (120, 700, 2_500, 6_000))
  random = np.random.default_rng(seed)
  return (0.2 * tones * (np.sin(3 * time) > -0.5) + 0.001 * random.standard_normal(samples)).astype(np.float32)


def extractor():
  from transformers import WhisperFeatureExtractor

  return WhisperFeatureExtractor(feature_size=128)


def references(sound):
  """[F,128] as Qwen3OmniMoeProcessor asks for it: in torch's float32, and in float64 as where there is no torch."""
  options = {"padding": True, "truncation": False, "return_attention_mask": True, "sampling_rate": RATE}
  found = extractor()(sound, return_tensors="np", **options)
  assert found["attention_mask"].all()
  return found["input_features"][0].T, extractor()._np_extract_fbank_features(sound[None], "cpu")[0].T


def frames(processed):
  """Without chunks and their padding."""
  there = processed.grid[..., 0].reshape(-1) >= 0
  return processed.inputs.reshape(-1, 128)[there]


@pytest.mark.parametrize("samples", LENGTHS)
def test_spectrograms_are_the_reference_s(samples):
  sound = voice(samples)
  found, (single, double) = frames(SOUNDS(sound)), references(sound)
  np.testing.assert_allclose(found, double, atol=1e-6, rtol=0)
  assert double.std() > 0.1
  # in float32 the quietest bands have noise of their own, which is the only difference
  np.testing.assert_allclose(found, single, atol=1e-6 + np.abs(single - double).max(), rtol=0)
  assert np.abs(found - single).max() < 1e-4
  assert np.abs(found - single).mean() < 1e-6


@pytest.mark.parametrize("kind", ["silence", "loud", "one tone", "a click"])
def test_spectrograms_of_extremes(kind):
  time = np.arange(20_000) / RATE
  sounds = {
    "silence": 0 * time,
    "loud": np.sign(np.sin(500 * time)),
    "one tone": np.sin(2 * np.pi * 1000 * time),
    "a click": np.eye(1, 20_000, 9_000)[0],
  }
  sound = sounds[kind].astype(np.float32)
  np.testing.assert_allclose(frames(SOUNDS(sound)), references(sound)[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("samples", LENGTHS)
def test_chunks_are_those_of_the_reference_s_tower(samples):
  torch = pytest.importorskip("torch")
  from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import chunk_and_pad_features

  sound = voice(samples)
  found, length = SOUNDS(sound), samples // 160
  whole = torch.from_numpy(frames(found).T.copy())
  chunks, lengths = chunk_and_pad_features(whole, torch.tensor([length]), 50)
  np.testing.assert_array_equal(found.inputs, chunks.transpose(1, 2).numpy())
  np.testing.assert_array_equal((found.grid[..., 0] >= 0).sum(1), lengths.numpy())
  for chunk, count in zip(found.grid, lengths.tolist(), strict=True):
    np.testing.assert_array_equal(chunk[:count, 0], np.arange(count))


def test_feature_counts_are_the_reference_s():
  from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths as theirs

  for samples in [*range(160, 60_000, 37), 4_800_000]:
    assert SOUNDS.features(samples) == theirs(samples // 160), samples


@pytest.mark.parametrize("samples", [1_600, 33_300])
def test_texts_are_the_reference_s(samples):
  from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as reference_module

  tokens = {name: f"<|{name}|>" for name in ("image_token", "video_token")}
  tower = types.SimpleNamespace(merge_size=2)
  around = types.SimpleNamespace(**tokens, audio_token="<|audio_pad|>", image_processor=tower, video_processor=tower)
  count = reference_module._get_feat_extract_output_lengths(samples // 160)
  expand = reference_module.Qwen3OmniMoeProcessor.replace_multimodal_special_tokens
  [text] = expand(around, ["a<|audio_pad|>b"], iter([count]), iter([]), iter([]), iter([]), False, 13, 2)
  found = SOUNDS(voice(samples))
  assert f"a{found.text}b" == text
  assert found.features == found.text.count("<|audio_pad|>") == count


def encoded(sound, rate=RATE, kind="WAV", subtype=None):
  file = io.BytesIO()
  soundfile.write(file, sound, rate, format=kind, subtype=subtype)
  return file.getvalue()


@pytest.mark.parametrize(
  ("kind", "subtype", "error"),
  [
    ("WAV", "PCM_16", 4e-5),
    ("WAV", "FLOAT", 0),
    ("WAV", "PCM_U8", 9e-3),
    ("FLAC", "PCM_24", 2e-7),
    ("MP3", None, 0.05),
  ],
)
def test_files_of_each_kind(tmp_path, kind, subtype, error):
  sound = voice(20_000) * 0.5
  data = encoded(sound, kind=kind, subtype=subtype)
  (tmp_path / "sound").write_bytes(data)
  for source in (data, tmp_path / "sound"):
    found = load_sound(source)
    assert found.dtype == np.float32
    assert found.shape == sound.shape
    # MP3 drops what one does not hear; its frames must still be at their place
    difference = np.sqrt(np.mean((found - sound) ** 2)) if kind == "MP3" else np.abs(found - sound).max()
    assert difference <= error


def test_channels_are_averaged():
  both = np.stack([voice(5_000), voice(5_000, seed=1)[::-1]], 1) * 0.5
  np.testing.assert_allclose(load_sound(encoded(both, subtype="FLOAT")), both.mean(1), atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 44_101, 48_000, 96_000])
def test_resampled_tones_are_the_tones(rate):
  """What both rates can hold is as if it had been recorded at the other; what the lower cannot hold is gone."""
  seconds = 0.5
  own, other = np.arange(int(rate * seconds)) / rate, np.arange(int(RATE * seconds)) / RATE
  highest = min(rate, RATE) / 2
  inner = slice(1_000, -1_000)
  for frequency in (0.0, 0.05 * highest, 0.5 * highest, 0.85 * highest):
    found = resample(np.cos(2 * np.pi * frequency * own).astype(np.float32), rate, RATE)
    assert len(found) == len(other)
    np.testing.assert_allclose(found[inner], np.cos(2 * np.pi * frequency * other)[inner], atol=2e-5)
  if rate > RATE * 1.2:
    too_high = np.cos(2 * np.pi * 1.1 * highest * own).astype(np.float32)
    assert np.abs(resample(too_high, rate, RATE)[inner]).max() < 2e-5


@pytest.mark.parametrize("samples", [1, 2, 100, 44_099])
def test_short_sounds_are_resampled(samples):
  found = load_sound(encoded(np.full(samples, 0.25), 44_100, subtype="FLOAT"))
  assert len(found) == -(-samples * 16_000 // 44_100)


WAV = encoded(voice(1_000))
HOSTILE = {
  "empty": (b"", "no sound of a known format"),
  "text": (b"no sound at all, but long enough to be looked at", "no sound of a known format"),
  "a format that is not read": (encoded(voice(1_000), kind="AU"), "The sound is AU"),
  "no header": (WAV[:30], "no sound of a known format"),
  "no numbers": (encoded(np.array([0.0, np.nan]), subtype="FLOAT"), "not finite numbers"),
  "slow": (encoded(voice(1_000), 900), "900 samples per second"),
  "odd": (encoded(voice(1_000), 16_001), "16001 samples per second, which is no usual rate"),
  "fast": (encoded(voice(1_000), 200_000), "200000 samples per second"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_sound_is_an_error_in_words(kind):
  data, words = HOSTILE[kind]
  with pytest.raises(MediaError, match=words):
    load_sound(data)


def test_limits():
  assert len(load_sound(WAV, limits=SoundLimits(bytes=len(WAV), samples=1_000))) == 1_000
  with pytest.raises(MediaError, match="limit of 999 samples"):
    load_sound(WAV, limits=SoundLimits(samples=999))
  with pytest.raises(MediaError, match="limit of 999 bytes"):
    load_sound(WAV, limits=SoundLimits(bytes=999))
  with pytest.raises(MediaError, match="has 159 samples"):
    SOUNDS(voice(159))
  promising = WAV[:40] + struct.pack("<I", 0x7FFFFFFF) + WAV[44:]  # two gigabytes, says the header
  assert len(load_sound(promising)) == 1_000


def test_damaged_bytes_never_crash():
  random = np.random.default_rng(0)
  refused = 0
  for kind in ("WAV", "FLAC", "MP3", "OGG"):
    data = encoded(voice(4_000), kind=kind)
    for _ in range(60):
      changed = np.frombuffer(data, np.uint8).copy()
      at = random.integers(0, min(len(changed), 200), 4)  # headers
      changed[at] = random.integers(0, 256, len(at))
      try:
        load_sound(changed.tobytes(), limits=SoundLimits(samples=1 << 20))
      except MediaError:
        refused += 1
  assert refused > 50
