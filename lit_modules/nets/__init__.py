"""Nets: pure torch, without trainer, rank or device.

A new net is a file here and two lines below: for type checkers, and in the table of what is imported when used.
"""

from typing import TYPE_CHECKING

from apprentice.faces import import_when_used

if TYPE_CHECKING:
    from lit_modules.nets.attention.cache import Cache
    from lit_modules.nets.attention.cross import CrossAttention
    from lit_modules.nets.attention.delta import DeltaAttention
    from lit_modules.nets.attention.differential import DifferentialAttention
    from lit_modules.nets.attention.form import any_kernel
    from lit_modules.nets.attention.gated import GatedLinearAttention
    from lit_modules.nets.attention.latent import LatentAttention
    from lit_modules.nets.attention.linear import LinearAttention
    from lit_modules.nets.attention.masks import mask_texts
    from lit_modules.nets.attention.mixer_cache import MixerCache
    from lit_modules.nets.attention.positions import Alibi, Rotary
    from lit_modules.nets.attention.softmax import SelfAttention
    from lit_modules.nets.base import Net, cast_inputs, check_fits, check_same_start, pipeline_stages, unwrap_logits
    from lit_modules.nets.batch_norm import globalise, has_no_running_statistics
    from lit_modules.nets.classes import class_order, classes_of, reorder_classes
    from lit_modules.nets.encoder_decoder import EncoderDecoder
    from lit_modules.nets.ensemble import Ensemble
    from lit_modules.nets.fast_text import FastText
    from lit_modules.nets.from_teacher import FromTeacher
    from lit_modules.nets.gpt import GPT
    from lit_modules.nets.hugging_face import HuggingFace, HuggingFaceLM
    from lit_modules.nets.hugging_face_reranker import HuggingFaceReranker
    from lit_modules.nets.hugging_face_seq2seq import HuggingFaceSeq2Seq
    from lit_modules.nets.hugging_face_text import HuggingFaceText
    from lit_modules.nets.layers import DEFAULT_LAYER, check_keeps_apart, find_stage, heads, layer, run
    from lit_modules.nets.maps import attention_maps
    from lit_modules.nets.mixer import Mixer
    from lit_modules.nets.mobilenet import MobileNetV2
    from lit_modules.nets.outputs import Outputs
    from lit_modules.nets.plain import DeepNN, LeNet, LightNN, MNISTNet
    from lit_modules.nets.pruned import Pruned
    from lit_modules.nets.resnet import ResNet
    from lit_modules.nets.rnn import RNNClassifier
    from lit_modules.nets.served import Served
    from lit_modules.nets.shufflenet import ShuffleNetV1, ShuffleNetV2
    from lit_modules.nets.timm import Timm
    from lit_modules.nets.torchvision import Torchvision
    from lit_modules.nets.vgg import VGG
    from lit_modules.nets.vit import ViT
    from lit_modules.nets.wide_resnet import WideResNet

MODULES = {
    "Alibi": "attention.positions",
    "Cache": "attention.cache",
    "CrossAttention": "attention.cross",
    "DeltaAttention": "attention.delta",
    "DifferentialAttention": "attention.differential",
    "GatedLinearAttention": "attention.gated",
    "LatentAttention": "attention.latent",
    "LinearAttention": "attention.linear",
    "MixerCache": "attention.mixer_cache",
    "Rotary": "attention.positions",
    "SelfAttention": "attention.softmax",
    "any_kernel": "attention.form",
    "mask_texts": "attention.masks",
    "Net": "base",
    "Outputs": "outputs",
    "cast_inputs": "base",
    "check_fits": "base",
    "check_same_start": "base",
    "pipeline_stages": "base",
    "unwrap_logits": "base",
    "globalise": "batch_norm",
    "has_no_running_statistics": "batch_norm",
    "class_order": "classes",
    "classes_of": "classes",
    "reorder_classes": "classes",
    "EncoderDecoder": "encoder_decoder",
    "Ensemble": "ensemble",
    "FromTeacher": "from_teacher",
    "GPT": "gpt",
    "HuggingFace": "hugging_face",
    "HuggingFaceLM": "hugging_face",
    "HuggingFaceReranker": "hugging_face_reranker",
    "HuggingFaceSeq2Seq": "hugging_face_seq2seq",
    "HuggingFaceText": "hugging_face_text",
    "DEFAULT_LAYER": "layers",
    "check_keeps_apart": "layers",
    "find_stage": "layers",
    "heads": "layers",
    "layer": "layers",
    "run": "layers",
    "attention_maps": "maps",
    "Mixer": "mixer",
    "MobileNetV2": "mobilenet",
    "DeepNN": "plain",
    "LeNet": "plain",
    "LightNN": "plain",
    "MNISTNet": "plain",
    "Pruned": "pruned",
    "ResNet": "resnet",
    "RNNClassifier": "rnn",
    "FastText": "fast_text",
    "Served": "served",
    "ShuffleNetV1": "shufflenet",
    "ShuffleNetV2": "shufflenet",
    "Timm": "timm",
    "Torchvision": "torchvision",
    "VGG": "vgg",
    "ViT": "vit",
    "WideResNet": "wide_resnet",
}

__all__ = list(MODULES)

if not TYPE_CHECKING:
    __getattr__ = import_when_used(__name__, MODULES)
