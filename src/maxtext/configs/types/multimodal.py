"""Images, video and sound."""

from pydantic import Field

from maxtext.configs.types.section import Section


class MultimodalGeneral(Section):
  """Inputs beside text."""

  use_multimodal: bool = Field(
    False, description="True adds the image (and video) encoder to the model and its inputs."
  )
  freeze_vision_encoder_params: bool = Field(True, description="True leaves the vision encoder's weights untrained.")
  freeze_audio_encoder_params: bool = Field(True, description="True leaves the audio encoder's weights untrained.")
  use_audio: bool = Field(False, description="True adds the audio encoder to the model and its inputs.")
  image_size_for_vit: int | list[int] = Field(
    896, description="Image side in pixels, or [height, width], into the vision encoder."
  )
  image_path: str = Field("", description="Image file for decoding, several separated by commas; '' is none.")
  image_placeholder: str = Field("<|image|>", description="Text that marks an image's place in the prompt.")
  posemb_type_for_vit: str = Field(
    "learn", description="Kind of position embedding in the vision encoder; 'learn' is trained."
  )
  max_num_images_per_example: int = Field(
    -1, description="Most images in one example, padded up to it; -1 is no limit."
  )
  video_path: str = Field("", description="Video file for decoding, several separated by commas; '' is none.")
  audio_path: str = Field("", description="Audio file for decoding, several separated by commas; '' is none.")
  video_placeholder: str = Field("<|video|>", description="Text that marks a video's place in the prompt.")
  audio_placeholder: str = Field("<|audio|>", description="Text that marks an audio clip's place in the prompt.")
  use_audio_in_video: bool = Field(False, description="True also reads the sound track of input videos.")
  use_mrope: bool = Field(False, description="True uses rotary positions in three axes: time, height and width.")
  mrope_section: list[int] = Field(
    [24, 20, 20], description="Rotary frequencies given to time, height and width (use_mrope)."
  )
  position_id_per_seconds: int = Field(25, ge=1, description="Time positions per second of video or audio (use_mrope).")


class VisionTower(Section):
  """The image encoder."""

  hidden_size_for_vit: int = Field(1408, ge=1, description="Model width of the vision encoder.")
  intermediate_size_for_vit: int = Field(5632, ge=1, description="Feed-forward width of the vision encoder.")
  num_attention_heads_for_vit: int = Field(16, ge=1, description="Attention heads per vision encoder layer.")
  num_channels_for_vit: int = Field(3, description="Color channels of input images.")
  tile_size_for_vit: int = Field(336, ge=1, description="Side in pixels of the tiles that a large image is cut into.")
  patch_size_for_vit: int = Field(14, ge=1, description="Side in pixels of one image patch.")
  conv_stride_for_vit: int = Field(14, ge=1, description="Pixels between patches; the patch size means no overlap.")
  num_hidden_layers_for_vit: int = Field(34, ge=1, description="Layers of the vision encoder.")
  rope_theta_for_vit: int = Field(10000, ge=1, description="Base of the rotary frequencies in the vision encoder.")
  vision_output_dim_for_vit: int = Field(4096, ge=1, description="Width of the vision encoder's output features.")
  spatial_merge_size_for_vit: int = Field(
    2, ge=1, description="Patches per side that are merged into one vision token."
  )
  out_hidden_size_for_vit: int = Field(512, ge=1, description="Width of vision tokens after the patch merger.")
  temporal_patch_size_for_vit: int = Field(2, ge=1, description="Video frames in one patch.")
  num_position_embeddings_for_vit: int = Field(
    1024, ge=1, description="Rows of the vision encoder's learned position table."
  )
  deepstack_visual_indexes_for_vit: list[int] = Field(
    [], description="Vision layers whose features also enter early decoder layers; [] is none."
  )
  vision_output_length: int = Field(-1, description="Vision tokens per image; -1 leaves it to the model.")


class VisionProjector(Section):
  """From image features to tokens."""

  projector_input_dim_for_vit: int = Field(4096, ge=1, description="Width of the features into the vision projector.")
  projector_output_dim_for_vit: int = Field(
    4096, ge=1, description="Width of the features out of the vision projector."
  )
  pixel_shuffle_ratio_for_vit: float = Field(
    0.5, gt=0, le=1, description="Scale of the patch grid's sides before projection; 0.5 quarters the tokens."
  )
  projector_dropout_for_vit: float = Field(
    0.0, ge=0, lt=1, description="Dropout rate of the features that the vision projector makes; 0 is none."
  )


class AudioEncoder(Section):
  """The sound encoder."""

  d_model_for_audio: int = Field(256, ge=1, description="Model width of the audio encoder.")
  encoder_attention_heads_for_audio: int = Field(4, ge=1, description="Attention heads per audio encoder layer.")
  encoder_ffn_dim_for_audio: int = Field(512, ge=1, description="Feed-forward width of the audio encoder.")
  encoder_layers_for_audio: int = Field(2, ge=1, description="Layers of the audio encoder.")
  attention_dropout_for_audio: float = Field(0.0, description="Dropout rate of audio attention weights; 0 is none.")
  activation_dropout_for_audio: float = Field(0.0, description="Dropout rate inside the audio feed-forward; 0 is none.")
  activation_function_for_audio: str = Field("gelu", description="Activation in the audio encoder's feed-forward.")
  num_mel_bins_for_audio: int = Field(128, ge=1, description="Mel frequency bands of the input spectrogram.")
  max_source_positions_for_audio: int = Field(1500, ge=1, description="Most positions in the audio encoder's sequence.")
  scale_embedding_for_audio: bool = Field(
    True, description="True multiplies audio embeddings by the square root of the width."
  )
  n_window_for_audio: int = Field(50, ge=1, description="Half the spectrogram frames in one audio chunk.")
  n_window_infer_for_audio: int = Field(
    800, ge=1, description="Spectrogram frames in one audio attention window at inference."
  )
  conv_chunksize_for_audio: int = Field(
    500, ge=1, description="Audio chunks put through the convolutions at once, to bound memory."
  )
  downsample_hidden_size_for_audio: int = Field(
    256, ge=1, description="Channels of the convolutions that shorten the audio."
  )
  output_dim_for_audio: int = Field(512, ge=1, description="Width of audio tokens into the decoder.")
  num_conv_layers_for_audio: int = Field(
    3, ge=1, description="Convolutions that shorten the audio before the encoder layers."
  )
  max_timescale_for_audio: float = Field(
    10000.0, gt=1, description="Longest wavelength of the audio encoder's sinusoidal positions."
  )
  max_sample_len_for_audio: int = Field(10000, ge=1, description="Most spectrogram frames in one audio sample.")
