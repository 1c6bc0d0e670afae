"""Small models with random weights, of the classes of transformers that its exporters are tested with.

A class is a name; its configuration is the default one with `SMALL` and what `CHANGES` says, its inputs are those of
class_inputs.py. Sizes are those of a test: they show whether a class is exported, lowered and right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from class_inputs import made

SKIPPED = {
    "always": """
        Qwen3ASRForConditionalGeneration Siglip2VisionModel Siglip2ForImageClassification JetMoeModel JetMoeForCausalLM
        JetMoeForSequenceClassification Lfm2VlModel Lfm2VlForConditionalGeneration MiniCPMV4_6Model
        MiniCPMV4_6ForConditionalGeneration FlavaModel FlavaForPreTraining PPDocLayoutV3ForObjectDetection""",
    "dynamic": """
        MaskFormerForInstanceSegmentation Qwen3_5ForCausalLM Qwen3NextForCausalLM MaskFormerSwinModel
        MaskFormerSwinBackbone SwinModel SwinBackbone SwinForImageClassification SwinForMaskedImageModeling Swinv2Model
        Swinv2Backbone Swinv2ForImageClassification Swinv2ForMaskedImageModeling DonutSwinModel
        DonutSwinForImageClassification EfficientNetModel EfficientNetForImageClassification HrmTextModel
        HrmTextForCausalLM Mask2FormerModel Mask2FormerForUniversalSegmentation BigBirdModel BigBirdForPreTraining
        BigBirdForMaskedLM BigBirdForCausalLM BigBirdForMultipleChoice BigBirdForQuestionAnswering
        BigBirdForSequenceClassification BigBirdForTokenClassification GroundingDinoModel
        GroundingDinoForObjectDetection MMGroundingDinoModel MMGroundingDinoForObjectDetection Sam2VisionModel
        Swin2SRModel Swin2SRForImageSuperResolution TimesformerModel TimesformerForVideoClassification""",
    "static": """
        SplinterForPreTraining MusicFlamingoModel MusicFlamingoForConditionalGeneration
        PaddleOCRVLForConditionalGeneration Wav2Vec2BertModel Wav2Vec2BertForCTC Wav2Vec2BertForSequenceClassification
        Wav2Vec2BertForAudioFrameClassification Wav2Vec2BertForXVector GroundingDinoModel
        GroundingDinoForObjectDetection MMGroundingDinoModel MMGroundingDinoForObjectDetection""",
    "generation": "MambaForCausalLM FalconMambaForCausalLM JambaForCausalLM",
    "not whole in XNNPACK, static": """
        Qwen3_5Model Qwen3_5TextModel Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration
        Qwen3_5ForSequenceClassification
        Qwen3_5ForTokenClassification Qwen3_5TextForSequenceClassification Qwen3NextModel Qwen3NextForCausalLM
        Qwen3NextForQuestionAnswering Qwen3NextForSequenceClassification Qwen3NextForTokenClassification
        Qwen3_5MoeModel Qwen3_5MoeTextModel Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration OlmoHybridModel
        OlmoHybridForCausalLM PerceiverModel PerceiverForOpticalFlow PerceiverForMultimodalAutoencoding""",
    "not whole in XNNPACK, dynamic": "MuseGlimmerModel MuseGlimmerForConditionalGeneration",
    "not whole in XNNPACK": "UnivNetModel",
}
"""The classes that transformers' own tests of its ExecuTorch exporter skip, or keep from XNNPACK, by shapes."""

PARTS = {
    "image_encoder language_model": """
        MiniCPMV4_6Model MiniCPMV4_6ForConditionalGeneration PaddleOCRVLForConditionalGeneration MuseGlimmerModel
        MuseGlimmerForConditionalGeneration Qwen3_5Model Qwen3_5ForConditionalGeneration Qwen3_5MoeModel
        Qwen3_5MoeForConditionalGeneration""",
    "audio_encoder multi_modal_projector language_model": """
        Qwen3ASRForConditionalGeneration MusicFlamingoModel MusicFlamingoForConditionalGeneration""",
}
"""Classes that are exported in parts, as the exporter's tests do: whole, graphs depend on what is in the inputs."""

KINDS = {
    "text": """
        BertModel BertForMaskedLM BertForSequenceClassification RobertaForMaskedLM DistilBertModel AlbertModel
        ElectraModel DebertaModel DebertaV2Model MPNetModel ConvBertModel FNetModel NystromformerModel RoFormerModel
        MegatronBertModel ModernBertModel CamembertForTokenClassification XLMRobertaForQuestionAnswering MobileBertModel
        SqueezeBertModel LongformerModel FunnelModel GPT2LMHeadModel GPTNeoForCausalLM GPTNeoXForCausalLM
        GPTJForCausalLM OPTForCausalLM BloomForCausalLM FalconForCausalLM LlamaForCausalLM MistralForCausalLM
        GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM PhiForCausalLM
        Phi3ForCausalLM CohereForCausalLM Cohere2ForCausalLM OlmoForCausalLM Olmo2ForCausalLM StableLmForCausalLM
        Starcoder2ForCausalLM SmolLM3ForCausalLM GraniteForCausalLM HeliumForCausalLM GlmForCausalLM Glm4ForCausalLM
        Ernie4_5ForCausalLM Exaone4ForCausalLM CodeGenForCausalLM MptForCausalLM NemotronForCausalLM
        DiffLlamaForCausalLM PersimmonForCausalLM BioGptForCausalLM T5ForConditionalGeneration
        MT5ForConditionalGeneration
        BartForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration
        M2M100ForConditionalGeneration MarianMTModel BlenderbotForConditionalGeneration LEDForConditionalGeneration""",
    "vision": """
        ViTModel ViTForImageClassification DeiTModel BeitModel ConvNextModel ConvNextV2Model
        ResNetForImageClassification
        RegNetModel SegformerForSemanticSegmentation MobileNetV1Model MobileNetV2Model MobileViTModel MobileViTV2Model
        Dinov2Model Dinov2WithRegistersModel PvtModel PvtV2Model PoolFormerModel FocalNetModel
        HieraModel GLPNModel DPTModel YolosForObjectDetection ViTMAEModel ViTMSNModel VideoMAEModel VivitModel BitModel
        IJepaModel SuperPointForKeypointDetection DINOv3ViTModel""",
    "audio": """
        Wav2Vec2Model Wav2Vec2ForCTC HubertModel WavLMModel UniSpeechSatModel SEWModel Data2VecAudioModel
        Wav2Vec2ConformerModel WhisperForConditionalGeneration WhisperForAudioClassification ASTModel
        Speech2TextForConditionalGeneration MoonshineForConditionalGeneration EncodecModel DacModel
        SpeechT5HifiGan FastSpeech2ConformerHifiGan""",
    "multimodal": """
        CLIPModel CLIPTextModel CLIPVisionModel SiglipModel BlipModel AltCLIPModel ChineseCLIPModel
        GroupViTModel ViltModel OwlViTModel CLIPSegModel LayoutLMModel LayoutLMv3Model VisualBertModel GitForCausalLM
        PerceiverForSequenceClassification FlavaImageModel FlavaTextModel""",
    "state space": """
        Mamba2ForCausalLM Lfm2ForCausalLM BambaForCausalLM RecurrentGemmaForCausalLM
        FalconH1ForCausalLM NemotronHForCausalLM RwkvForCausalLM""",
    "mixture": """
        MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM OlmoeForCausalLM PhimoeForCausalLM GptOssForCausalLM
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM GraniteMoeForCausalLM Glm4MoeForCausalLM Ernie4_5_MoeForCausalLM
        FlexOlmoForCausalLM MiniMaxForCausalLM Dots1ForCausalLM SwitchTransformersForConditionalGeneration""",
}
"""Further classes, by what they are."""

SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "decoder_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_num_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_codebooks"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "embedding_size", "patch_size", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "projection_dim", "num_mel_bins"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("time_step_rank", "num_frames", "layerdrop"), 4),
    **{"layerdrop": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99, "image_size": 32},
}
"""Values for every configuration that has a whole number of that name."""

SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2, "image_size": 16}
STAGE_NAMES = ["stage1", "stage2", "stage3", "stage4"]
BACKBONE = {**SWIN, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "out_features": STAGE_NAMES}
DETECTED = {
    "d_model": 32, "num_queries": 6, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2,
    "max_text_len": 8, "disable_custom_kernels": True,
    "backbone_config": {**BACKBONE, "image_size": 32, "out_features": ["stage2", "stage3", "stage4"]},
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
PICTURED = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
WAVES = {"conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 2], "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "patch_size": 4}
VOCODER = {
    "model_in_dim": 16, "upsample_initial_channel": 16, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
    "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
}  # fmt: skip
LATENT = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
        "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
        "head_dim": ...,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "Swin2SR": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16,
        "patch_size": 1},
    "Swin": SWIN,
    "SwinBackbone": {**SWIN, "out_features": ["stage1", "stage2"]},
    "Swinv2Backbone": {**SWIN, "out_features": ["stage1", "stage2"]},
    "SwinForMaskedImageModeling": {**SWIN, "encoder_stride": 4},
    "Swinv2ForMaskedImageModeling": {**SWIN, "encoder_stride": 4},
    "MaskFormerSwin": SWIN,
    "DonutSwin": SWIN,
    "MaskFormerForInstanceSegmentation": {
        "mask_feature_size": 32, "fpn_feature_size": 32, "backbone_config": BACKBONE,
        "decoder_config": {"num_queries": 5, "backbone_config": None, "num_labels": 3},
    },
    "Mask2Former": {
        "hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "encoder_feedforward_dim": 64,
            "dim_feedforward": 64,
        "num_queries": 5, "decoder_layers": 3, "encoder_layers": 2, "backbone_config": BACKBONE,
    },
    "GroundingDino": DETECTED,
    "MMGroundingDino": DETECTED,
    "PPDocLayoutV3": {
        "d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "decoder_in_channels": [32, 32,
            32],
        "num_queries": 8, "decoder_n_points": 2, "num_denoising": 0, "mask_feature_channels": [16, 16],
            "x4_feat_dim": 16,
        "num_prototypes": 8, "global_pointer_head_size": 8, "hidden_expansion": 0.5, "decoder_ffn_dim": 64,
            "encoder_ffn_dim": 64,
        "image_size": 64,
        "backbone_config": {
            "embedding_size": 8, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "stem_channels": [3, 8, 8],
            "stage_in_channels": [8, 16, 32, 48], "stage_mid_channels": [8, 8, 16, 16], "stage_out_channels": [16, 32,
                48, 64],
            "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
    },
    "EfficientNet": {
        "depth_coefficient": 0.5, "width_coefficient": 0.25, "in_channels": [16, 8, 16], "out_channels": [8, 16, 24],
        "kernel_sizes": [3, 3, 5], "strides": [1, 2, 2], "num_block_repeats": [1, 1, 2], "expand_ratios": [1, 4, 4],
        "hidden_dim": 320,
    },
    "HrmText": {"num_layers_per_stack": 1, "num_hidden_layers": 8, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1]},
    "BigBird": {"block_size": 4, "num_random_blocks": 1, "sep_token_id": 3},
    "Sam2Vision": {
        "backbone_channel_list": [64, 32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 16,
        "image_size": 64,
        "backbone_config": {
            "hidden_size": 8, "image_size": [64, 64], "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16,
                32, 64],
            "window_size_per_stage": [4, 2, 4, 2], "global_attention_blocks": [3], "num_attention_heads": 1,
        },
    },
    "Timesformer": {"num_frames": 2},
    "Splinter": {"question_token_id": 3},
    "Qwen3_5Text": DELTA, "Qwen3_5ForCausalLM": DELTA, "Qwen3_5MoeForCausalLM": DELTA, "Qwen3_5MoeText": DELTA,
        "Qwen3Next": DELTA, "OlmoHybrid": {**DELTA, "num_key_value_heads": 4},
    "Qwen3_5": {
        **PICTURED, "text_config": {**DELTA, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
        "vision_config": {"depth": 1, "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
    },
    "Qwen3ASR": {
        "audio_token_id": 90, "timestamp_token_id": 91,
        "audio_config": {"downsample_hidden_size": 8, "output_dim": 32, "n_window_infer": 100,
                         "max_position_embeddings": 13},
    },
    "MusicFlamingo": {"audio_token_id": 90, "audio_bos_token_id": 91, "audio_eos_token_id": 92,
                      "audio_config": {"max_source_positions": 8}},
    "PaddleOCRVL": {**PICTURED, "vision_config": {"patch_size": 4, "image_size": 16},
                    "text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "MuseGlimmer": {
        "image_token_id": 90, "video_token_id": 91, "out_hidden_size": 128, "projector_hidden_size": 32,
        "vision_config": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "patch_temporal": 1},
    },
    "MiniCPMV4_6": {"image_token_id": 90, "video_token_id": 91, "insert_layer_id": 0, "image_size": 16,
                    "text_config": DELTA, "vision_config": {"patch_size": 4, "image_size": 16}},
    "Perceiver": {"num_latents": 6, "d_latents": 16, "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
                  "num_cross_attention_heads": 2, "qk_channels": None, "v_channels": None},
    "PerceiverForOpticalFlow": {
        "num_latents": 6, "d_latents": 16, "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
            "d_model": 322,
        "num_cross_attention_heads": 1, "train_size": [16, 24],
    },
    "UnivNet": {
        "model_in_channels": 8, "model_hidden_channels": 8, "num_mel_bins": 16, "resblock_kernel_sizes": [3, 3],
        "resblock_stride_sizes": [2, 2], "resblock_dilation_sizes": [[1, 3], [1, 3]], "kernel_predictor_num_blocks": 1,
        "kernel_predictor_hidden_channels": 8,
    },
    "Wav2Vec2Bert": {
        "vocab_size": 32, "feature_projection_input_dim": 24, "output_hidden_size": 32, "conv_depthwise_kernel_size": 5,
        "tdnn_dim": [16, 16, 24], "tdnn_kernel": [3, 2, 1], "tdnn_dilation": [1, 2, 1], "xvector_output_dim": 16,
        "classifier_proj_size": 16,
    },
    "Flava": {"image_codebook_config": {"hidden_size": 16, "num_groups": 2, "num_blocks_per_group": 1,
        "vocab_size": 99},
              "return_loss": False},
    "JetMoe": {"kv_channels": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
    "FalconMamba": {}, "Jamba": {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_hidden_layers": 2},
    "Wav2Vec2": WAVES, "Hubert": WAVES, "WavLM": WAVES, "UniSpeechSat": WAVES, "Wav2Vec2Conformer": WAVES,
    "Data2VecAudio": {**WAVES, "conv_pos_kernel_size": 5}, "SEW": {**WAVES, "squeeze_factor": 2},
    "PerceiverForMultimodalAutoencoding": {
        "num_latents": 6, "d_latents": 16, "num_self_attends_per_block": 1, "num_self_attention_heads": 1,
            "d_model": 32,
        "num_cross_attention_heads": 1, "image_size": 16, "num_frames": 2, "audio_samples_per_frame": 32,
        "samples_per_patch": 8, "output_shape": [1, 2, 16, 16], "num_labels": 5,
    },
    "Lfm2Vl": {
        "image_token_id": 90, "projector_hidden_size": 32, "vision_config": {"patch_size": 4, "num_patches": 16},
        "text_config": {"layer_types": ["conv", "full_attention"]},
    },
    "ConvNext": {**STAGES, "num_stages": 4, "num_hidden_layers": ...}, "ResNet": STAGES,
    "RegNet": {**STAGES, "groups_width": 4}, "PoolFormer": {**STAGES, "patch_size": 7},
    "Bit": {**STAGES, "num_groups": 2},
    "FocalNet": {"embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "Cvt": {"embed_dim": [8, 16, 32], "depth": [1, 1, 1], "num_heads": [1, 2, 2]},
    "MobileViTV2": {"patch_size": 2, "image_size": 64}, "MobileViT": {"patch_size": 2}, "Levit": {"image_size": 64},
    "Yolos": {"image_size": [32, 32], "num_detection_tokens": 5, "detection_token_initializer": ...},
    "Whisper": {"max_source_positions": 32, "decoder_start_token_id": 2},
    "AST": {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "Speech2Text": {"input_feat_per_channel": 16, "conv_channels": 16, "decoder_start_token_id": 2},
    "Encodec": {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_dim": 32, "codebook_size": 32},
    "Dac": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 16,
        "upsampling_ratios": [4, 2],
            "codebook_size": 32, "codebook_dim": 4, "n_codebooks": 2, "hidden_size": 32},
    "SpeechT5HifiGan": VOCODER, "FastSpeech2ConformerHifiGan": VOCODER,
    "LayoutLMv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32},
    "SqueezeBert": {"embedding_size": 32}, "Funnel": {"block_sizes": [1, 1], "num_hidden_layers": ...,
        "num_blocks": ...},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]}, "GPTNeoX": {}, "Nemotron": {"head_dim": 8,
        "num_key_value_heads": 4}, "NemotronH": {},
    "Mamba2": {"num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "RecurrentGemma": {"num_hidden_layers": 3},
    "DeepseekV2": LATENT, "DeepseekV3": LATENT, "Dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
}  # fmt: skip
"""What differs from `SMALL`, by the name of the class, or what it is without its head."""


@dataclass(frozen=True)
class Entry:
    """A class that is tried.

    Args:
        name: The class in transformers; with a dot and a part of it, where that is exported.
        kind: What it is: text, vision, audio, multimodal, state space, mixture, or skipped.
        skipped: For which shapes transformers' tests skip it, or keep operators of it from XNNPACK; "" for none.
    """

    name: str
    kind: str
    skipped: str = ""

    def model(self) -> Any:
        """A model in evaluation mode, or the part of it that is tried; the same weights each time."""
        whole = self._whole()
        return self._part(whole, made(self.name, whole, 2, 1))[0] if "." in self.name else whole

    def inputs(self, model: Any, batch: int = 2, scale: int = 1, seed: int = 0) -> dict[str, Any]:
        """Inputs of a size: rows, and a scale of what else may vary (the length of a text, the side of an image)."""
        whole = self._whole() if "." in self.name else model
        torch.manual_seed(seed)
        inputs = made(self.name, whole, batch, scale)
        return self._part(whole, inputs)[1] if "." in self.name else inputs

    def _whole(self) -> Any:
        """A model whose weights keep signals of a size, so that no two tie."""
        kind = getattr(transformers, self.name.partition(".")[0])
        torch.manual_seed(0)
        model = kind(small(kind.config_class, _changes(self.name))).eval()
        for part in model.modules():
            if isinstance(part, torch.nn.Linear | torch.nn.modules.conv._ConvNd):
                torch.nn.init.normal_(part.weight, std=(2 / part.weight[0].numel()) ** 0.5)
                if part.bias is not None:
                    torch.nn.init.normal_(part.bias, std=0.1)
            elif isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                torch.nn.init.ones_(part.weight)
        return model

    def _part(self, whole: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A part of a model, as the exporters take it apart, and what it takes."""
        from transformers.exporters.utils import decompose_multimodal

        return decompose_multimodal(whole, inputs)[self.name.partition(".")[2]]


def _changes(name: str) -> dict[str, Any]:
    """The longest prefix of a class's name that has changes."""
    return CHANGES.get(max(filter(name.startswith, CHANGES), key=len, default=""), {})


def small(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration of a class, and those in it, with small sizes."""
    default = config_class()
    values: dict[str, Any] = {
        name: value
        for name, value in SMALL.items()
        if hasattr(default, name)
        and (type(getattr(default, name)) in (int, float) or name.endswith("token_id"))
        and getattr(getattr(config_class, name, None), "fset", True) is not None
    }
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and isinstance(changes.get(name, {}), dict):
            values[name] = small(type(part), changes.get(name, {}))
    parts = getattr(config_class, "sub_configs", {})
    values.update((name, value) for name, value in changes.items() if name not in parts or not isinstance(value, dict))
    return config_class(**{name: value for name, value in values.items() if value is not ...})


def entries() -> dict[str, Entry]:
    """All classes, those that transformers skips first."""
    found: dict[str, Entry] = {}
    parts = {name: words for words, names in PARTS.items() for name in names.split()}
    for shapes, names in SKIPPED.items():
        for one in names.split():
            for name in [f"{one}.{part}" for part in parts.get(one, "").split()] or [one]:
                before = found[name].skipped + "; " if name in found else ""
                found[name] = Entry(name, "skipped", before + shapes)
    for kind, names in KINDS.items():
        found.update((name, Entry(name, kind)) for name in names.split() if name not in found)
    return found
