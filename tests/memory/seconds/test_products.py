"""What kernels multiply, on instructions made by hand: size, dtype and FLOPs of each kind."""

import json

import pytest

from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.records.schedule_records import ScheduledKernel
from bytescope.memory.seconds import products
from bytescope.memory.seconds.products import KernelWork
from support.formats import field

pytestmark = pytest.mark.quick

BITS = {"int32": 32, "float32": 32, "bfloat16": 16, "float8_e4m3fn": 8, "uint8": 8}


def array(*dims, dtype="float32"):
    return HloShape(dtype, dims, 0, None, BITS[dtype])


def work(opcode, operands, result, *fields, target="", config=None):
    """What one operation over parameters multiplies; `fields`: of its proto, `config`: its backend's settings."""
    data = b"".join(fields) + (field(43, json.dumps(config).encode()) if config else b"")
    module = Module(data, entry=1, computations={1: Computation(1)})
    for id, shape in enumerate((*operands, result)):
        module.instructions[id] = Instruction(id, f"i{id}", "parameter", computation=1)
        module._shapes[id] = shape
    last = Instruction(
        len(operands), "it", opcode, list(range(len(operands))), target=target, computation=1, span=(0, len(data))
    )
    module.instructions[last.id] = last
    return products.find(module, last)


def numbers(contracted, batch=b""):
    return field(30, field(1, contracted) + field(3, batch))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ((), "tf32"),
        ((field(51, field(1, b"\1\1")),), "tf32"),
        ((field(51, field(1, b"\2\2")),), "float32"),
        ((field(51, field(2, 11)),), "float32"),
        ((field(51, field(1, b"\2\2") + field(2, 9)),), "tf32"),
    ],
)
def test_products_and_their_precision(fields, dtype):
    """B 3, m 10, k 4, n 6; the contracted axis of the left is its second."""
    found = work("dot", (array(3, 4, 10), array(3, 4, 6)), array(3, 10, 6), numbers(b"\1", b"\0"), *fields)
    flops = 2 * 3 * 10 * 6 * 4
    assert found == KernelWork("product", flops, dtype, (3, 10, 6, 4))


def test_the_wider_operand_counts():
    for narrow, wide in (("float8_e4m3fn", "bfloat16"), ("bfloat16", "bfloat16")):
        pair = (array(8, 4, dtype=narrow), array(4, 2, dtype=wide))
        assert work("dot", pair, array(8, 2), numbers(b"\1")).dtype == wide
        assert work("dot", pair[::-1], array(2, 8), numbers(b"\0")).dtype == wide


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ({}, "tf32"),
        ({"operand_precision": ["DEFAULT", "HIGHEST"]}, "float32"),
        ({"algorithm": "ALG_DOT_F32_F32_F32"}, "float32"),
        ({"algorithm": "ALG_DOT_TF32_TF32_F32", "operand_precision": ["HIGHEST"]}, "tf32"),
    ],
)
def test_a_librarys_product(precision, dtype):
    gemm = {
        "gemm_backend_config": {
            "dot_dimension_numbers": {"lhs_contracting_dimensions": ["2"], "lhs_batch_dimensions": ["0"]},
            "precision_config": precision,
        }
    }
    result = HloShape(parts=(array(3, 10, 6), array(99, dtype="uint8")))
    found = work("custom-call", (array(3, 10, 4), array(3, 4, 6)), result, target="__cublas$lt$matmul", config=gemm)
    assert (found.kind, found.flops, found.size, found.dtype) == ("product", 1440, (3, 10, 6, 4), dtype)


@pytest.mark.parametrize(
    ("target", "mask", "window", "kind", "products_", "pairs"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, "attention", 4, 64),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, "attention", 4, 32),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, "attention_backward", 10, 32),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 0, "attention_backward", 10, 64),
        ("__cudnn$fmhaSoftmax", "PADDING_CAUSAL", 2, "attention", 4, 32 - 18),
    ],
)
def test_attention_counts_what_the_mask_leaves(target, mask, window, kind, products_, pairs):
    """2 x 3 heads of 8 queries and keys of width 16."""
    scores = {
        "cudnn_fmha_backend_config": {
            "mask_type": mask,
            "sliding_window_length": window,
            "intermediate_tensor_shape": {"dimensions": ["2", "3", "8", "8"]},
        }
    }
    query = array(2, 8, 3, 16, dtype="bfloat16")
    found = work("custom-call", (query, query, query), query, target=target, config=scores)
    assert found == KernelWork(kind, products_ * 6 * pairs * 16, "bfloat16", (6, 8, 8, 16), "CAUSAL" in mask)
    whole = ScheduledKernel(found.kind, "forward", 1, found.flops, found.dtype, found.size, found.causal)
    assert products.unmasked_flops(whole) == products_ * 6 * 64 * 16


CONVOLUTION = field(16, field(3, 1) + field(4, 0) + field(6, b"\2\3"))  # kernels OIHW


@pytest.mark.parametrize(
    ("opcode", "target", "operands", "result"),
    [
        ("convolution", "", ((2, 5, 9, 9), (7, 5, 3, 3)), (2, 7, 9, 9)),
        ("custom-call", "__cudnn$convForward", ((2, 5, 9, 9), (7, 5, 3, 3)), (2, 7, 9, 9)),
        ("custom-call", "__cudnn$convBackwardInput", ((2, 7, 9, 9), (7, 5, 3, 3)), (2, 5, 9, 9)),
        ("custom-call", "__cudnn$convBackwardFilter", ((2, 5, 9, 9), (2, 7, 9, 9)), (7, 5, 3, 3)),
    ],
)
def test_convolutions_and_their_gradients_are_of_one_size(opcode, target, operands, result):
    found = work(opcode, [array(*dims) for dims in operands], array(*result), CONVOLUTION, target=target)
    assert (found.kind, found.flops, found.size) == ("convolution", 2 * (2 * 7 * 81) * (5 * 9), ())


def test_a_convolution_without_a_window_is_a_product():
    found = work("convolution", (array(64, 16, 1, 1), array(32, 16, 1, 1)), array(64, 32, 1, 1), CONVOLUTION)
    assert (found.kind, found.flops, found.size) == ("product", 2 * 64 * 32 * 16, (1, 64, 32, 16))


@pytest.mark.parametrize(
    "operands, result, size",
    [
        (((640, 64), (8, 64, 96)), (640, 96), (1, 640, 96, 64)),
        (((640, 96), (8, 64, 96)), (640, 64), (1, 640, 64, 96)),
        (((640, 64), (640, 96)), (8, 64, 96), (1, 64, 96, 640)),
    ],
)
def test_a_foreign_kernel_of_experts(operands, result, size):
    """Rows of all experts with the matrix of each, which integers tell; and the gradient of the matrices."""
    tiles = (array(5, dtype="int32"),) * (1 if len(result) == 2 else 2)
    floats = tuple(array(*dims, dtype="bfloat16") for dims in operands)
    found = work("custom-call", (*tiles, *floats), array(*result, dtype="bfloat16"), target="__gpu$xla.gpu.triton")
    assert found == KernelWork("grouped_product", 2 * 640 * 64 * 96, "bfloat16", size)
    unlike = work("custom-call", (*tiles, *floats), array(7, 3, dtype="bfloat16"), target="__gpu$xla.gpu.triton")
    assert unlike == KernelWork("foreign", 0, "bfloat16")


@pytest.mark.parametrize(
    ("operands", "result", "size"),
    [
        (((10, 4), (6, 4)), (10, 6), (1, 10, 6, 4)),
        (((4, 10), (4, 6)), (10, 6), (1, 10, 6, 4)),
        (((3, 10, 4), (3, 4, 6)), (3, 10, 6), (3, 10, 6, 4)),
        (((10, 4), (6, 5)), (10, 6), ()),
        (((10, 4), (10, 4)), (10, 4), ()),
        (((10,), (10,)), (10,), ()),
    ],
)
def test_a_foreign_kernel_is_what_its_arrays_look_like(operands, result, size):
    arrays = [array(*dims, dtype="float8_e4m3fn") for dims in operands]
    found = work("custom-call", (*arrays, array(2)), array(*result), target="__gpu$xla.gpu.triton")
    flops = 2 * size[0] * size[1] * size[2] * size[3] if size else 0
    assert found == KernelWork("foreign", flops, "float8_e4m3fn", size)


def test_grouped_products_and_kernels_without_any():
    found = work("ragged-dot", (array(10, 4), array(3, 4, 6), array(3)), array(10, 6))
    assert (found.kind, found.flops, found.size) == ("product", 2 * 10 * 4 * 6, (1, 10, 6, 4))
    assert work("add", (array(4), array(4)), array(4)) is None
    assert work("custom-call", (array(4),), array(4), target="TopK") is None


def test_a_fusion_is_its_largest_product_with_the_flops_of_all():
    data = numbers(b"\1")
    module = Module(data, entry=1, computations={1: Computation(1), 2: Computation(2, instructions=[3, 4, 5, 6, 7])})
    shapes = {3: array(8, 4), 4: array(4, 2), 5: array(4, 6), 6: array(8, 2), 7: array(8, 6)}
    for id, shape in shapes.items():
        module.instructions[id] = Instruction(id, opcode="parameter", computation=2)
        module._shapes[id] = shape
    for id, right in ((6, 4), (7, 5)):
        module.instructions[id] = Instruction(id, opcode="dot", operands=[3, right], computation=2, span=(0, len(data)))
    found = products.find(module, Instruction(9, opcode="fusion", called=[2]))
    assert found == KernelWork("product", 2 * 8 * 4 * (2 + 6), "tf32", (1, 8, 6, 4))
