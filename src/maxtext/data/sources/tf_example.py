"""Parses `tf.train.Example` messages without TensorFlow."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from maxtext.configs.errors import RunError


def feature_values(record: bytes, columns: Sequence[str], images: Sequence[str] = ()) -> list[Any]:
  """The values of some features: bytes for text, a list of integers for tokens; for `images` a list of bytes."""
  from google.protobuf.message import DecodeError

  message = _example()()
  try:
    message.ParseFromString(record)
  except DecodeError:
    raise RunError("not a tf.train.Example: write those, or prepare tokens by `maxtext data prepare`.") from None
  features = message.features.feature
  values = []
  for column in columns:
    kind = features[column].WhichOneof("kind") if column in features else None
    if kind not in ("bytes_list", "int64_list"):
      has = ", ".join(sorted(features)) or "nothing"
      raise RunError(f"no text or integers under '{column}'; it has {has}. Set the *_data_columns keys.")
    found = getattr(features[column], kind).value
    values.append(found[0] if kind == "bytes_list" else list(found))
  return [*values, *(list(features[name].bytes_list.value) if name in features else None for name in images)]


@cache
def _example() -> Any:
  """The message class, defined here because only TensorFlow contains it."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  proto = descriptor_pb2.FileDescriptorProto(name="maxtext/example.proto", package="maxtext", syntax="proto3")
  field = descriptor_pb2.FieldDescriptorProto

  def message(name: str, *fields: dict[str, Any], within: Any = proto.message_type) -> Any:
    descriptor = within.add(name=name)
    for number, values in enumerate(fields, 1):
      descriptor.field.add(number=number, label=values.pop("label", field.LABEL_OPTIONAL), **values)
    return descriptor

  many = field.LABEL_REPEATED
  message("BytesList", {"name": "value", "label": many, "type": field.TYPE_BYTES})
  message("FloatList", {"name": "value", "label": many, "type": field.TYPE_FLOAT})
  message("Int64List", {"name": "value", "label": many, "type": field.TYPE_INT64})
  kinds = [
    {"name": name, "type": field.TYPE_MESSAGE, "type_name": f".maxtext.{kind}", "oneof_index": 0}
    for name, kind in (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
  ]
  message("Feature", *kinds).oneof_decl.add(name="kind")
  entries = {
    "name": "feature",
    "label": many,
    "type": field.TYPE_MESSAGE,
    "type_name": ".maxtext.Features.FeatureEntry",
  }
  features = message("Features", entries)
  key = {"name": "key", "type": field.TYPE_STRING}
  value = {"name": "value", "type": field.TYPE_MESSAGE, "type_name": ".maxtext.Feature"}
  message("FeatureEntry", key, value, within=features.nested_type).options.map_entry = True
  message("Example", {"name": "features", "type": field.TYPE_MESSAGE, "type_name": ".maxtext.Features"})
  pool = descriptor_pool.DescriptorPool()
  pool.Add(proto)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("maxtext.Example"))
