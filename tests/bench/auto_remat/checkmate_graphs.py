"""Rebuilds published instances of Checkmate (Jain et al., MLSys 2020) from its code.

Its artifact, https://github.com/parasj/checkmate at commit 1889c578 (branch mlsys20_artifact), stores no graphs: it
builds them from Keras models, and costs measured on a V100 were downloaded from a bucket. So the graphs here have the
costs that the artifact computes without measurements:

- models and batch sizes: `reproduce_all.sh`; VGG16 with 256 images, MobileNet with 512, vgg_unet with 32;
- edges: `remat/tensorflow2/extraction.py`, `dfgraph_from_keras`: a layer is one operation; its gradient reads its
  output, the outputs and the gradients of the layers that read it, and costs twice its operations;
- operations and bytes of a layer: `remat/tensorflow2/extraction_hooks.py`, 4 bytes per element. An operation there is
  one multiplication and addition of a product, or one elementwise operation;
- vgg_unet: `keras_segmentation/models/unet.py` and `vgg16.py` of https://github.com/divamgupta/image-segmentation-keras.

The blocks are ours: the stages of VGG and of the U-Net's decoder, the depthwise-separable pairs of MobileNet.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
from graph import BACKWARD, Graph, Node
from keras import layers

BYTES = 4
KINDS = {"Conv2D": "convolution", "DepthwiseConv2D": "convolution", "Dense": "matmul"}
KINDS |= {"BatchNormalization": "reduction", "MaxPooling2D": "reduction", "GlobalAveragePooling2D": "reduction"}
SOURCE = "https://github.com/parasj/checkmate at 1889c578, rebuilt: {}, {} images"


def operations(layer: Any, batch: int) -> int:
    """Returns the cost of a layer by the rules of `extraction_hooks.py`."""
    kind = type(layer).__name__
    ins = layer.input if isinstance(layer.input, list) else [layer.input]
    read = sum(math.prod(one.shape[1:]) for one in ins) * batch
    made = math.prod(layer.output.shape[1:]) * batch
    if kind == "Conv2D":
        return math.prod(layer.kernel.shape[:3]) * made
    if kind == "DepthwiseConv2D":
        return math.prod(layer.kernel.shape[:2]) * made
    if kind == "Dense":
        return layer.kernel.shape[0] * made
    if kind == "BatchNormalization":
        return 4 * read
    if kind in ("ReLU", "Activation"):
        return read
    if kind == "UpSampling2D":
        return made
    return 0


def graph_of(model: Any, name: str, batch: int, stages: dict[str, str]) -> Graph:
    """Returns the graph of a Keras model for a batch of images.

    stages: pattern of a layer's name -> its block. Other layers are in the block of the layer before them.
    """
    every = model.layers[1:]
    readers: dict[str, list[str]] = {layer.name: [] for layer in every}
    sources: dict[str, list[str]] = {}
    for layer in every:
        ins = layer.input if isinstance(layer.input, list) else [layer.input]
        sources[layer.name] = [one._keras_history.operation.name for one in ins]
        for source in sources[layer.name]:
            readers.get(source, []).append(layer.name)
    image = model.layers[0]
    nodes = [Node(image.name, "input", BYTES * batch * math.prod(image.output.shape[1:]))]
    blocks, block = {}, ""
    for layer in every:
        for pattern, stage in stages.items():
            match = re.match(pattern, layer.name)
            if match:
                block = match.expand(stage)
        blocks[layer.name] = block
        kind, size = KINDS.get(type(layer).__name__, "elementwise"), BYTES * batch * math.prod(layer.output.shape[1:])
        reads = tuple(sources[layer.name])
        nodes.append(Node(layer.name, kind, size, operations(layer, batch), reads, block=block, label=layer.name))
    last = every[-1].name
    nodes.append(Node("loss", "reduction", BYTES, 0, (last,), block=block, label="loss"))
    nodes.append(Node("cotangent", "cotangent", BYTES))
    forward = {node.name: node for node in nodes}
    for layer in reversed(every):
        own = forward[layer.name]
        after = readers[layer.name] or ["loss"]
        gradients = [f"{one}.gradient" for one in after] if readers[layer.name] else ["cotangent"]
        reads = tuple(dict.fromkeys((*gradients, *after, layer.name)))
        label = f"{layer.name}.gradient"
        nodes.append(Node(label, own.kind, own.bytes, 2 * own.flops, reads, BACKWARD, blocks[layer.name], label))
    return Graph(name, SOURCE.format(model.name, batch), tuple(nodes), ("loss",), (nodes[-1].name,))


def checkmate_vgg16() -> Graph:
    model = keras.applications.VGG16(weights=None)
    return graph_of(model, "checkmate_vgg16", 256, {r"(block\d)": r"\1", "flatten": "top"})


def checkmate_mobilenet() -> Graph:
    model = keras.applications.MobileNet(weights=None)
    stages = {"conv1": "stem", r"conv_(?:pad|dw)_(\d+)": r"pair\1", "global": "top"}
    return graph_of(model, "checkmate_mobilenet", 512, stages)


def checkmate_unet() -> Graph:
    """vgg_unet: an encoder of four VGG stages, a decoder with skip connections, 416 x 608 pixels, 19 classes."""
    image = x = keras.Input((416, 608, 3))
    skips = []
    for stage, (channels, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3)], 1):
        for number in range(1, count + 1):
            name = f"block{stage}_conv{number}"
            x = layers.Conv2D(channels, 3, activation="relu", padding="same", name=name)(x)
        x = layers.MaxPooling2D(2, name=f"block{stage}_pool")(x)
        skips.append(x)
    skips.pop()
    for stage, channels in enumerate((512, 256, 128, 64)):
        if stage:
            x = layers.UpSampling2D(2, name=f"up{stage}_sample")(x)
            x = layers.Concatenate(name=f"up{stage}_concat")([x, skips.pop()])
        x = layers.ZeroPadding2D(1, name=f"up{stage}_pad")(x)
        x = layers.Conv2D(channels, 3, activation="relu", name=f"up{stage}_conv")(x)
        x = layers.BatchNormalization(name=f"up{stage}_norm")(x)
    x = layers.Conv2D(19, 3, padding="same", name="classes")(x)
    x = layers.Reshape((-1, 19), name="flat")(x)
    x = layers.Activation("softmax", name="softmax")(x)
    model = keras.Model(image, x, name="vgg_unet")
    return graph_of(model, "checkmate_unet", 32, {r"(block\d)": r"\1", r"(up\d)": r"\1"})


INSTANCES = (checkmate_vgg16, checkmate_mobilenet, checkmate_unet)
