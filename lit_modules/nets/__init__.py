"""Nets: pure torch, without trainer, rank or device. A new net is a file here and a line below."""

from lit_modules.nets.attention import (
    Alibi,
    Cache,
    CrossAttention,
    DeltaAttention,
    DifferentialAttention,
    GatedLinearAttention,
    LatentAttention,
    LinearAttention,
    Rotary,
    SelfAttention,
    any_kernel,
    mask_texts,
)
from lit_modules.nets.attention_maps import attention_maps
from lit_modules.nets.base import (
    Net,
    Outputs,
    cast_inputs,
    check_fits,
    check_same_start,
    pipeline_stages,
    unwrap_logits,
)
from lit_modules.nets.batch_norm import globalise, has_no_running_statistics
from lit_modules.nets.classes import class_order, classes_of, reorder_classes
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.from_teacher import FromTeacher
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFace, HuggingFaceLM
from lit_modules.nets.layers import DEFAULT_LAYER, check_keeps_apart, find_stage, heads, layer, run
from lit_modules.nets.mixer import Mixer
from lit_modules.nets.mobilenet import MobileNetV2
from lit_modules.nets.plain import DeepNN, LeNet, LightNN, MNISTNet
from lit_modules.nets.pruned import Pruned
from lit_modules.nets.resnet import ResNet
from lit_modules.nets.rnn import RNNClassifier
from lit_modules.nets.shufflenet import ShuffleNetV1, ShuffleNetV2
from lit_modules.nets.timm import Timm
from lit_modules.nets.torchvision import Torchvision
from lit_modules.nets.vgg import VGG
from lit_modules.nets.vit import ViT
from lit_modules.nets.wide_resnet import WideResNet
