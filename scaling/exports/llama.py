"""Which Llama-shaped architecture a run's model is, and what its tensors are called there. Torch-free.

The toolkit's block with SwiGLU and gains in its norms is Llama's, and with QK-norm Qwen 3's; rotary positions pair the same entries.
"""

from __future__ import annotations

from scaling.config import RunConfig
from scaling.errors import Fault

_HF = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_TITAN = {
    "attention.query": "attention.qkv_linear.wq",
    "attention.key": "attention.qkv_linear.wk",
    "attention.value": "attention.qkv_linear.wv",
    "attention.output": "attention.wo",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "attention_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
}
_OLMO = {
    "attention.query": "attention.w_q",
    "attention.key": "attention.w_k",
    "attention.value": "attention.w_v",
    "attention.output": "attention.w_out",
    "attention.query_norm": "attention.q_norm",
    "attention.key_norm": "attention.k_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "attention_norm": "attention_norm",
    "mlp_norm": "feed_forward_norm",
}


def huggingface_name(name: str) -> str:
    """Our name of a tensor -> transformers' in LlamaForCausalLM and Qwen3ForCausalLM."""
    ends = {
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "readout.weight": "lm_head.weight",
    }
    return ends.get(name) or _in_block(name, "model.layers", _HF)


def torchtitan_name(name: str) -> str:
    """Our name of a tensor -> torchtitan's in its llama3 model without fused QKV."""
    ends = {"embedding.weight": "tok_embeddings.weight", "final_norm.weight": "norm.weight", "readout.weight": "lm_head.weight"}
    return ends.get(name) or _in_block(name, "layers", _TITAN)


def olmo_name(name: str) -> str:
    """Our name of a tensor -> OLMo-core's in its transformer without fused QKV."""
    ends = {
        "embedding.weight": "embeddings.weight",
        "final_norm.weight": "lm_head.norm.weight",
        "readout.weight": "lm_head.w_out.weight",
    }
    return ends.get(name) or _in_block(name, "blocks", _OLMO)


def _in_block(name: str, layers: str, names: dict[str, str]) -> str:
    _, layer, *middle, last = name.split(".")
    return f"{layers}.{layer}.{names['.'.join(middle)]}.{last}"


def llama_faults(run: RunConfig, theirs: str, *, qk_norm: bool) -> list[Fault]:
    """Why `theirs`, a model of an engine by name, is not this run's. qk_norm: whether there is one with QK-norm."""
    model, faults = run.model, []
    if model.activation != "swiglu":
        what = f"{theirs} has SwiGLU, three matrices an MLP; this model has {model.activation}"
        faults.append(Fault("model.activation", what, "--set model.activation=swiglu, and study that model"))
    if not model.norm_gain:
        what = f"norms of {theirs} have trained gains, and this model has none"
        faults.append(Fault("model.norm_gain", what, "--set model.norm_gain=true, and study that model"))
    if model.qk_norm and not qk_norm:
        faults.append(Fault("model.qk_norm", f"{theirs} has no QK-norm", "--engine hf --form folded writes Qwen 3, which has"))
    return faults
