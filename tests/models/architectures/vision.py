"""Vision models: classification, detection, segmentation and depth; small stages, small images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.models.architectures.architecture import Architecture, Inputs, image

_PATCHES: Mapping[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "image_size": 40,
    "patch_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_STAGES: Mapping[str, Any] = {
    "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "image_size": 32, "patch_size": 2,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
_RESNET: Mapping[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]}
_SWIN_BACKBONE: Mapping[str, Any] = {
    "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "image_size": 64, "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
_DETECTOR: Mapping[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip


def _prompted_image() -> Inputs:
    points = torch.rand(2, 1, 3, 2) * 60
    return {**image(64)(), "input_points": points, "input_labels": torch.tensor([[[1, 0, 1]], [[1, 1, 0]]])}


CLASSIFIERS = {
    "vit": Architecture("ViTForImageClassification", "ViTConfig", _PATCHES, image(40)),
    "deit": Architecture("DeiTModel", "DeiTConfig", _PATCHES, image(40)),
    "beit": Architecture(
        "BeitForImageClassification", "BeitConfig", {**_PATCHES, "use_relative_position_bias": True}, image(40)
    ),
    "dinov2": Architecture("Dinov2Model", "Dinov2Config", {**_PATCHES, "drop_path_rate": 0.2}, image(40)),
    "swin": Architecture("SwinForImageClassification", "SwinConfig", {**_STAGES, "window_size": 4}, image(32)),
    "swinv2": Architecture("Swinv2ForImageClassification", "Swinv2Config", {**_STAGES, "window_size": 4}, image(32)),
    "pvt_v2": Architecture(
        "PvtV2ForImageClassification",
        "PvtV2Config",
        {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 32], "mlp_ratios": [2, 2, 2, 2],
         "num_attention_heads": [1, 2, 2, 4]},
        image(64),
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 40], "drop_path_rate": 0.2},
        image(64),
    ),
    "convnextv2": Architecture(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 24, 32, 40]},
        image(64),
    ),
    "resnet": Architecture("ResNetForImageClassification", "ResNetConfig", _RESNET, image(64)),
    "regnet": Architecture(
        "RegNetForImageClassification", "RegNetConfig", {**_RESNET, "groups_width": 8, "layer_type": "y"}, image(64)
    ),
    "mobilenet_v1": Architecture(
        "MobileNetV1ForImageClassification", "MobileNetV1Config", {"depth_multiplier": 0.25}, image(65)
    ),
    "mobilenet_v2": Architecture(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.25}, image(65)
    ),
    "mobilevit": Architecture(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64],
         "num_attention_heads": 4},
        image(64),
    ),
    "efficientnet": Architecture(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
        image(64),
    ),
    # Its last norm is over the batch alone: of two elements it gives signs, and their gradient is rounding.
    "levit": Architecture(
        "LevitForImageClassification",
        "LevitConfig",
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8]},
        lambda: {"pixel_values": torch.randn(8, 3, 64, 64)},
    ),
    "poolformer": Architecture(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 40], "drop_path_rate": 0.1},
        image(64),
    ),
    "cvt": Architecture(
        "CvtForImageClassification",
        "CvtConfig",
        {"embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
        image(64),
    ),
}  # fmt: skip

DETECTORS = {
    "detr": Architecture(
        "DetrForObjectDetection", "DetrConfig", _DETECTOR, image(64),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage4"]})},
    ),
    "conditional_detr": Architecture(
        "ConditionalDetrForObjectDetection", "ConditionalDetrConfig", _DETECTOR, image(64),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage4"]})},
    ),
    "deformable_detr": Architecture(
        "DeformableDetrForObjectDetection", "DeformableDetrConfig",
        {**_DETECTOR, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2}, image(64),
        parts={"backbone_config": ("ResNetConfig", {**_RESNET, "out_features": ["stage3", "stage4"]})},
    ),
    "yolos": Architecture(
        "YolosForObjectDetection",
        "YolosConfig",
        {**_PATCHES, "image_size": [40, 48], "num_detection_tokens": 5},
        lambda: {"pixel_values": torch.randn(2, 3, 40, 48)},
    ),
}  # fmt: skip

SEGMENTERS = {
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4],
         "decoder_hidden_size": 24},
        image(64),
    ),
    "maskformer": Architecture(
        "MaskFormerForInstanceSegmentation", "MaskFormerConfig",
        {"fpn_feature_size": 32, "mask_feature_size": 32}, image(64),
        parts={
            "backbone_config": ("SwinConfig", _SWIN_BACKBONE),
            "decoder_config": ("DetrConfig", {k: v for k, v in _DETECTOR.items() if "backbone" not in k}),
        },
    ),
    "mask2former": Architecture(
        "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig",
        {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 48,
         "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "dim_feedforward": 48, "num_queries": 7},
        image(64), parts={"backbone_config": ("SwinConfig", _SWIN_BACKBONE)},
    ),
    "sam": Architecture(
        "SamModel", "SamConfig", {}, _prompted_image,
        parts={
            "vision_config": ("SamVisionConfig", {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
                "output_channels": 24, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 48,
                "num_pos_feats": 12}),
            "prompt_encoder_config": ("SamPromptEncoderConfig", {
                "hidden_size": 24, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}),
            "mask_decoder_config": ("SamMaskDecoderConfig", {
                "hidden_size": 24, "mlp_dim": 40, "num_attention_heads": 4, "iou_head_hidden_dim": 24}),
        },
    ),
    "dpt": Architecture(
        "DPTForDepthEstimation", "DPTConfig",
        {**_PATCHES, "num_hidden_layers": 4, "image_size": 32, "is_hybrid": False,
         "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 24, 24], "fusion_hidden_size": 24},
        image(32),
    ),
    "glpn": Architecture(
        "GLPNForDepthEstimation", "GLPNConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4],
         "decoder_hidden_size": 16}, image(64),
    ),
}  # fmt: skip
