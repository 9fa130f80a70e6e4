"""Speech models: encoders of waveforms and spectra, recognition and synthesis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.models.architectures.architecture import VOCABULARY, Architecture, Inputs, ids, waveform

_CONVOLUTIONS: Mapping[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80,
    "conv_dim": [16, 16, 16], "conv_kernel": [8, 3, 2], "conv_stride": [4, 2, 2], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size": VOCABULARY,
    # Spectral masks come from numpy, and a dropped layer from a number read in Python.
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip


def _spectrum(frames: int, bins: int) -> Inputs:
    return {"input_features": torch.randn(2, bins, frames)}


def _whisper_inputs() -> Inputs:
    return {**_spectrum(100, 20), "decoder_input_ids": torch.randint(5, VOCABULARY, (2, 13))}


def _speech_to_text_inputs() -> Inputs:
    return {"input_features": torch.randn(2, 40, 20), "decoder_input_ids": torch.randint(5, VOCABULARY, (2, 13))}


def _vits_inputs() -> Inputs:
    return ids(length=11)


def _spoken_inputs() -> Inputs:
    return {**ids(), "decoder_input_values": torch.randn(2, 14, 20)}


SPEECH = {
    "whisper": Architecture(
        "WhisperModel",
        "WhisperConfig",
        {"vocab_size": VOCABULARY, "num_mel_bins": 20, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80,
         "max_source_positions": 50, "max_target_positions": 64, "use_cache": False, "dropout": 0.1,
         "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 3, "apply_spec_augment": False},
        _whisper_inputs,
    ),
    "speech_to_text": Architecture(
        "Speech2TextModel",
        "Speech2TextConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 80,
         "decoder_ffn_dim": 80, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "conv_channels": 32,
         "input_feat_per_channel": 20, "max_source_positions": 64, "max_target_positions": 64, "use_cache": False},
        _speech_to_text_inputs,
    ),
    "wav2vec2": Architecture("Wav2Vec2ForCTC", "Wav2Vec2Config", _CONVOLUTIONS, waveform(800)),
    "hubert": Architecture("HubertModel", "HubertConfig", _CONVOLUTIONS, waveform(800)),
    "wavlm": Architecture("WavLMModel", "WavLMConfig", _CONVOLUTIONS, waveform(800)),
    "unispeech": Architecture("UniSpeechModel", "UniSpeechConfig", _CONVOLUTIONS, waveform(800)),
    "sew": Architecture("SEWModel", "SEWConfig", {**_CONVOLUTIONS, "squeeze_factor": 2}, waveform(800)),
    "wav2vec2_conformer": Architecture(
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        {**_CONVOLUTIONS, "conv_depthwise_kernel_size": 7},
        waveform(800),
    ),
    "audio_spectrogram_transformer": Architecture(
        "ASTModel",
        "ASTConfig",
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "patch_size": 4,
         "frequency_stride": 3, "time_stride": 3, "max_length": 24, "num_mel_bins": 16, "hidden_dropout_prob": 0.1},
        lambda: {"input_values": torch.randn(2, 24, 16)},
    ),
    "speecht5": Architecture(
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80,
         "num_mel_bins": 20, "speech_decoder_prenet_units": 24, "speech_decoder_postnet_units": 24,
         "speech_decoder_postnet_layers": 2, "use_cache": False, "speaker_embedding_dim": 0,
         "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "reduction_factor": 2},
        _spoken_inputs,
    ),
    "vits": Architecture(
        "VitsModel",
        "VitsConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 80,
         "flow_size": 48, "spectrogram_bins": 17, "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2,
         "duration_predictor_num_flows": 2, "depth_separable_num_layers": 2, "upsample_initial_channel": 32,
         "upsample_rates": [4, 2], "upsample_kernel_sizes": [8, 4], "resblock_kernel_sizes": [3],
         "resblock_dilation_sizes": [[1, 3]], "noise_scale": 0.0, "noise_scale_duration": 0.0, "layerdrop": 0.0},
        _vits_inputs,
    ),
    "encodec": Architecture(
        "EncodecModel",
        "EncodecConfig",
        {"num_filters": 8, "hidden_size": 16, "codebook_size": 32, "codebook_dim": 16, "num_lstm_layers": 1,
         "upsampling_ratios": [4, 2], "target_bandwidths": [24.0], "sampling_rate": 24000},
        lambda: {"input_values": torch.randn(2, 1, 320)},
        eager_dtypes=("float32",),
    ),
}  # fmt: skip
