"""Architectures of timm, torchvision and transformers, small and with random weights.

torchvision's models are Python, but the package registers shapes for its library in C when it is imported, which fails
beside a PyTorch of another build: that module is replaced by an empty one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = ("timm", "torchvision", "transformers")


class First(nn.Module):
    """A model as a function of tensors that gives one tensor: the first of what it gives."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], fixed: dict[str, Any]) -> None:
        super().__init__()
        self.m, self.names, self.fixed = model, names, fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        out = self.m(**dict(zip(self.names, tensors)), **self.fixed) if self.names else self.m(*tensors)
        while not isinstance(out, Tensor):
            out = next(iter(out.values())) if isinstance(out, dict) else out[0]
        return out


@dataclass(frozen=True)
class Architecture:
    """A model, and what it is fed with."""

    package: str
    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]

    def made(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights, none equal to another, without dropout; and inputs by name."""
        stub_torchvision()  # transformers imports it, too
        torch.manual_seed(0)
        net, inputs = self.build()
        for module in net.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "DropPath":
                module.p = module.drop_prob = 0.0  # type: ignore[assignment]
        with torch.no_grad():  # exporters merge equal tensors; and a bias of zeros shows nothing
            for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
                if not isinstance(tensor, nn.Parameter) and ".running_" not in name:
                    continue
                if tensor.dim() < 2 or bool((tensor == tensor.flatten()[0]).all()):
                    tensor.add_(torch.rand_like(tensor) * 0.2 - 0.1)
        return net, inputs


def stub_torchvision() -> None:
    """Let torchvision be imported without its library in C."""
    name = "torchvision._meta_registrations"
    if "torchvision" not in sys.modules:
        sys.modules[name] = types.ModuleType(name)


def image(side: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side)


def from_timm(name: str, side: int = 64, **options: Any) -> Architecture:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import timm

        timm.layers.set_fused_attn(False)  # PyTorch's fused attention has no second order
        return First(timm.create_model(name, num_classes=5, **options), (), {}), {"x": image(side)}

    return Architecture("timm", name, build)


def from_torchvision(name: str, side: int = 64, **options: Any) -> Architecture:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import torchvision

        return First(torchvision.models.get_model(name, weights=None, **options), (), {}), {"x": image(side)}

    return Architecture("torchvision", name, build)


def optical_flow(name: str) -> Architecture:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import torchvision

        net = First(torchvision.models.get_model(name, weights=None), ("image1", "image2"), {"num_flow_updates": 2})
        return net, {"image1": torch.rand(1, 3, 128, 128), "image2": torch.rand(1, 3, 128, 128)}

    return Architecture("torchvision", name, build)


#: What a small configuration is called by those that spell it as BERT does, and as Llama does.
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
LLAMA = BERT | {"num_key_value_heads": 1, "max_position_embeddings": 64}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 50}
VIT = {k: v for k, v in BERT.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}
BART = {
    **{"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}
SERIES = {
    **{"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16},
    **{"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0},
}


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 50, (2, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def translation() -> dict[str, Tensor]:
    return tokens() | {"decoder_input_ids": torch.randint(1, 50, (2, 6))}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": image(32)}


def series() -> dict[str, Tensor]:
    past, future = 10, 4
    return {
        "past_values": torch.rand(2, past),
        "past_time_features": torch.rand(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.rand(2, future),
        "future_time_features": torch.rand(2, future, 1),
    }


def from_transformers(
    name: str,
    options: dict[str, Any],
    feeds: Callable[[], dict[str, Tensor]] = tokens,
    label: str = "",
    head: str = "Model",
) -> Architecture:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        import transformers

        config = getattr(transformers, name.removesuffix("Encoder") + "Config")(**options)
        config._attn_implementation = "eager"
        for key, value in {"use_cache": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0}.items():
            if hasattr(config, key):
                setattr(config, key, value)
        for key in [
            k for k in vars(config) if ("dropout" in k or k.endswith("pdrop")) and isinstance(getattr(config, k), float)
        ]:
            setattr(config, key, 0.0)
        inputs = feeds()
        fixed = {} if feeds is pixels else {"use_cache": False} if feeds is translation else {}
        return First(getattr(transformers, name + head)(config), tuple(inputs), fixed), inputs

    return Architecture("transformers", label or name, build)


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 50, (2, 8))}


def architectures() -> Iterator[Architecture]:
    """All of them."""
    for name, side in {
        **{"resnet18": 64, "resnet50": 64, "resnetv2_50": 64, "densenet121": 64, "vgg11_bn": 64, "inception_v3": 96},
        **{"mobilenetv3_small_050": 64, "mobilenetv4_conv_small_050": 64, "efficientnet_b0": 64, "regnetx_002": 64},
        **{"ghostnet_050": 64, "mnasnet_050": 64, "convnext_atto": 64, "convnextv2_atto": 64, "res2net50_14w_8s": 64},
        **{"hrnet_w18_small": 64, "dla34": 64, "repvgg_a0": 64, "fastvit_t8": 64, "edgenext_xx_small": 64},
        **{"efficientformer_l1": 224, "levit_128s": 224, "poolformer_s12": 64, "lcnet_050": 64, "nfnet_l0": 64},
        **{
            "skresnet18": 64,
            "cspresnet50": 64,
            "xcit_nano_12_p16_224": 224,
            "mobilevit_xxs": 64,
            "coatnet_nano_rw_224": 224,
        },
    }.items():
        yield from_timm(name, side)
    small = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
    yield from_timm("vit_tiny_patch16_224", 32, patch_size=8, **small)
    yield from_timm("deit_tiny_distilled_patch16_224", 32, patch_size=8, **small)
    yield from_timm("beit_base_patch16_224", 32, patch_size=8, **small)
    yield from_timm(
        "swin_tiny_patch4_window7_224", 32, img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 2), window_size=4
    )
    yield from_timm(
        "swinv2_tiny_window8_256", 32, img_size=32, embed_dim=16, depths=(2, 2), num_heads=(2, 2), window_size=4
    )
    yield from_timm("mixer_s16_224", 32, img_size=32)
    yield from_timm("cait_xxs24_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    for name, side in {
        **{
            "alexnet": 64,
            "squeezenet1_1": 64,
            "googlenet": 64,
            "shufflenet_v2_x0_5": 64,
            "mobilenet_v2": 64,
            "mnasnet0_5": 64,
        },
        **{
            "resnet18": 64,
            "resnext50_32x4d": 64,
            "densenet121": 64,
            "regnet_y_400mf": 64,
            "convnext_tiny": 64,
            "efficientnet_b0": 64,
        },
        **{"inception_v3": 96, "swin_t": 64, "maxvit_t": 224},
    }.items():
        yield from_torchvision(name, side, **({"init_weights": True} if name in ("googlenet", "inception_v3") else {}))
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield from_torchvision(name, 64, weights_backbone=None)
    yield optical_flow("raft_small")
    for name in ("Bert", "Roberta", "MPNet", "XLMRoberta", "LayoutLM", "MegatronBert", "Ernie", "RemBert", "IBert"):
        yield from_transformers(name, BERT)
    for name in ("Albert", "Electra", "RoFormer", "ConvBert", "SqueezeBert"):
        yield from_transformers(name, BERT | {"embedding_size": 16})
    yield from_transformers(
        "MobileBert", BERT | {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16}
    )
    yield from_transformers("Deberta", BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]})
    yield from_transformers("DebertaV2", BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]})
    yield from_transformers("DistilBert", {"vocab_size": 50, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32})
    yield from_transformers("ModernBert", BERT | {"pad_token_id": 0})
    yield from_transformers("FNet", {k: v for k, v in BERT.items() if k != "num_attention_heads"}, ids)
    yield from_transformers("Longformer", BERT | {"attention_window": 4})
    yield from_transformers("BigBird", BERT | {"attention_type": "original_full"})
    yield from_transformers("Nystromformer", BERT | {"num_landmarks": 8, "segment_means_seq_len": 8})
    yield from_transformers("Canine", {k: v for k, v in BERT.items() if k != "vocab_size"})
    yield from_transformers("XLNet", {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32})
    yield from_transformers(
        "Funnel", {"vocab_size": 50, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}
    )
    yield from_transformers("GPT2", GPT)
    yield from_transformers("GPTNeoX", BERT)
    yield from_transformers("Bloom", {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2})
    yield from_transformers(
        "OPT",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
        },
    )
    for name in ("Llama", "Mistral", "Qwen2", "Phi"):
        yield from_transformers(name, LLAMA)
    for name in ("Gemma", "Gemma2", "Qwen3"):
        yield from_transformers(name, LLAMA | {"head_dim": 8})
    yield from_transformers(
        "Falcon", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    yield from_transformers("Mamba", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4})
    yield from_transformers(
        "T5Encoder", {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    )
    yield from_transformers(
        "T5", {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}, translation
    )
    yield from_transformers("Bart", BART, translation)
    yield from_transformers("Marian", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}, translation)
    yield from_transformers("ViT", VIT, pixels)
    yield from_transformers("DeiT", VIT, pixels)
    yield from_transformers(
        "Segformer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
        pixels,
    )
    yield from_transformers(
        "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        pixels,
    )
    yield from_transformers("TimeSeriesTransformer", SERIES, series)
    yield from_transformers(
        "Informer", SERIES | {"attention_type": "full", "distil": False}, series, "Informer, full attention"
    )
    yield from_transformers(
        "Informer",
        SERIES | {"attention_type": "prob", "distil": True, "sampling_factor": 1},
        series,
        "Informer, sampled attention",
    )
    yield from_transformers("Autoformer", SERIES | {"moving_average": 3, "label_length": 4}, series)
