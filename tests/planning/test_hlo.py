# ruff: noqa: E501 (the lines of programs are long)
"""Reading compiled programs: text written for the purpose, and what this machine's compiler makes."""

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.planning.hlo import Collective, Kernel, Program

LOOPS = """
HloModule jit_step, is_scheduled=true

%parts_body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %two = u32[]{:T(128)} constant(2)
  %p = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %next = u32[]{:T(128)} add(%i, %two)
  %x = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %send.1 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1
  %sent.1 = bf16[8,4]{1,0} collective-permute-done(%send.1)
  ROOT %out = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) tuple(%next, %sent.1)
}

%parts_condition (p: (s32[], f32[8,4])) -> pred[] {
  %count = u32[]{:T(128)} constant(4)
  %p = (u32[]{:T(128)}, bf16[8,4]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %count), direction=LT
}

%all-reduce-scatter (q: f32[16,4]) -> f32[2,4] {
  %q = f32[16,4]{1,0} parameter(0)
  %sum = f32[16,4]{1,0} all-reduce(%q), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %part = f32[2,4]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={2,4}
}

%async_collective_fusion.2 (q: bf16[2,4]) -> bf16[8,4] {
  %q = bf16[2,4]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,4]{1,0} all-gather(%q), channel_id=5, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
}

%starts (q: bf16[2,4]) -> bf16[8,4] {
  %q = bf16[2,4]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,4]{1,0} all-gather(%q), channel_id=5, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
}

%layer (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[], bf16[8,4]{1,0}) parameter(0)
  %part = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter, backend_config={"estimated_cycles":"100"}
  %w1 = bf16[8,4]{1,0} fusion(%p), kind=kLoop, calls=%starts, backend_config={"estimated_cycles":"7"}
  %w2 = bf16[8,4]{1,0} fusion(%w1), kind=kOutput, calls=%async_collective_fusion.2
  %attend.7 = (f32[4,2]{1,0}, bf16[2,3,16,128]{3,2,1,0}) custom-call(%p, %w2), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2]{1,0}, bf16[2,3,16,128]{3,2,1,0}}, frontend_attributes={}
  %inner = (u32[]{:T(128)}, bf16[8,4]{1,0}) while(%p), condition=%parts_condition, body=%parts_body
  ROOT %out = (s32[], bf16[8,4]{1,0}) tuple(%i, %w2)
}

%more (p: (s32[], bf16[8,4])) -> pred[] {
  ROOT %less = pred[] parameter(0)
}

ENTRY %main (a: f32[3]) -> f32[] {
  %a = f32[3]{0} parameter(0)
  %layers = (s32[], bf16[8,4]{1,0}) while(%a), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"12"}}
  %g = (f32[], f32[3]{0}, /*index=2*/f32[5]{0}) all-reduce(%a, %a, %a), channel_id=9, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %rest = f32[] all-reduce(%a), channel_id=10, replica_groups={}, to_apply=%add
}
"""


def test_a_program_is_read_as_it_is_executed():
    program = Program(LOOPS, 8)
    assert program.unknown_loops == 0
    assert program.times["layer"] == 12
    assert program.times["parts_body"] == 12 * 2, "it counts to 4 by twos"
    assert program.cycles() == 12 * 107
    found = set(program.collectives())
    assert found == {
        Collective("reduce-scatter", 16 * 4 * 4, 8, 12, False),
        Collective("all-gather", 8 * 4 * 2, 4, 12, True),  # one, though it stands in two computations
        Collective("collective-permute", 8 * 4 * 2, 8, 24, True),
        Collective("all-reduce", 4 + 12 + 20, 4, 1, False),
        Collective("all-reduce", 4, 8, 1, False),
    }
    assert program.kernels() == [Kernel("attend.7", ((1, 2), (2, 3, 16, 128)), 12)]


def test_a_loop_without_a_known_end_is_told():
    program = Program(LOOPS.replace(', backend_config={"known_trip_count":{"n":"12"}}', ""), 8)
    assert program.unknown_loops == 1
    assert program.times["layer"] == 1


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 750), ("reduce-scatter", 750), ("all-reduce", 1_500), ("collective-permute", 1_000)],
)
def test_bytes_that_a_ring_sends(kind, sent):
    """Of four devices each passes on three quarters of an array, and for a sum twice."""
    assert Collective(kind, 1_000, 4, 1, False).sent == sent
    assert Collective(kind, 1_000, 4, 3, False).sent == 3 * sent


def test_loops_of_this_compiler():
    def inner(x, _):
        return jnp.sin(x @ x), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0], None

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    text = jax.jit(lambda x: jax.lax.scan(outer, x, None, length=5)[0]).lower(x).compile().as_text()
    program = Program(text, 1)
    assert program.unknown_loops == 0
    assert {5, 15} <= set(program.times.values())
    assert not program.collectives()
    assert not program.cycles()
