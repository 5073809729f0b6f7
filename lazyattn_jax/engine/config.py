"""Options of an engine, and what they come to on a given device with a given model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from lazyattn_jax.cache.eviction import POLICIES
from lazyattn_jax.cache.pool import bytes_per_token
from lazyattn_jax.engine.limits import Limits
from lazyattn_jax.engine.request import DocumentContext
from lazyattn_jax.engine.reuse import MODES, Reuse
from lazyattn_jax.models.config import LlamaConfig

GIB = 1 << 30
_CPU_POOL_BYTES = GIB
POOL_SHARE = 0.9  # of the accelerator memory that the weights leave
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. ``None`` and ``auto`` choose by model and device.

    Attributes:
      kv_pool_bytes: size of the KV pool; default 1 GiB on a CPU, else 90 % of the memory that the
        weights leave.
      host_kv_bytes: memory of the host for documents that the pool has no room for: they come back
        from there instead of being computed again. Of use where requests share documents, so not
        with ``reuse`` of ``prefix`` or ``none``.
      page_size: tokens a page, a power of two; default 16.
      max_model_len: tokens of prompt and output together; default what the model was made for, and
        for a model with a sliding window at most the window: it is not computed.
      max_num_seqs: requests computed at the same time; default 16 on a CPU, else 256.
      max_num_batched_tokens: tokens of one prefill step; default 512 on a CPU, else 4096.
      prefill_buckets: tokens that prefill steps are padded to, rising to
        ``max_num_batched_tokens``; more of them pad less but take longer to compile. By default
        each is twice the one before it, on a CPU eight times.
      decode_buckets: requests that decode steps are padded to, rising to ``max_num_seqs``.
      max_documents: documents of one request.
      reuse: ``lazy`` attends to documents where they are, ``block`` turns them to their place and
        copies them into pages of each request, ``prefix`` reuses equal beginnings of prompts with
        full attention, ``none`` computes everything anew.
      document_context: ``prefix`` encodes documents after the request's leading text, ``none``
        alone; ``auto`` is ``none`` where an adapter for such documents is loaded, else ``prefix``;
        ``full`` after all that precedes them: only where ``reuse`` is ``none``. With ``reuse`` of
        ``prefix`` it is always full.
      document_gap: positions left out between the prefix and a document.
      document_repair: first tokens of every document, rounded up to whole pages, that are computed
        in the request's context and not reused.
      document_temperature: scores of text against documents are divided by it.
      document_select: answer over so many documents, those that make the text after them likeliest;
        0 answers over all.
      eviction: which segments go first of those that no request in line needs: ``gdsf``
        (GreedyDual-Size-Frequency: those that bring least for their pages), ``lfu`` (the same by a
        count that outlives eviction: for documents that come back, not for chats) or ``lru`` (the
        least recently used).
      max_overtaken: how many requests may be computed before one that came earlier, because fewer
        of their documents have to be encoded; with 0 it is first come, first served.
      share_reads: a decode step reads a document once for all requests that hold it; without, once
        for each, which is only good for measuring what that brings.
      attention: implementation of the attention: ``auto``, ``mosaic_gpu`` (NVIDIA Hopper),
        ``mosaic_tpu``, ``xla`` or ``reference``; only ``auto`` picks another where one cannot run.
      dtype: of weights, activations and KV: ``float32`` (default on a CPU), ``bfloat16`` (default
        elsewhere) or ``float16``.
      check_invariants: check before every step that its plan names only pages of the pool, and
        after it that all pages and pins are accounted for.
    """

    kv_pool_bytes: int | None = None
    host_kv_bytes: int = 0
    page_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_buckets: tuple[int, ...] = ()
    decode_buckets: tuple[int, ...] = ()
    max_documents: int = 256
    reuse: str = "lazy"
    document_context: str = "auto"
    document_gap: int = 200
    document_repair: int = 0
    document_temperature: float = 1.0
    document_select: int = 0
    eviction: str = "gdsf"
    max_overtaken: int = 0
    share_reads: bool = True
    attention: str = "auto"
    dtype: str = "auto"
    check_invariants: bool = False

    def __post_init__(self) -> None:
        if self.reuse not in MODES:
            raise ValueError(f"reuse is {self.reuse!r}, must be one of {', '.join(MODES)}")
        if self.document_context not in ("auto", "prefix", "none", "full"):
            raise ValueError(
                f"document_context is {self.document_context!r}, must be 'auto', 'prefix', 'none' "
                "or 'full'"
            )
        if self.document_context == "full" and self.reuse in ("lazy", "block"):
            raise ValueError(
                f"document_context is 'full', reuse {self.reuse!r} needs 'prefix' or 'none': a "
                "document that has seen what precedes it is of no use to other requests"
            )
        _ = self.context  # checks its values
        if self.eviction not in POLICIES:
            raise ValueError(f"eviction is {self.eviction!r}, must be one of {', '.join(POLICIES)}")
        if self.max_overtaken < 0:
            raise ValueError(f"max_overtaken is {self.max_overtaken}, must be at least 0")
        if self.host_kv_bytes < 0:
            raise ValueError(f"host_kv_bytes is {self.host_kv_bytes}, must be at least 0")
        if self.dtype != "auto" and self.dtype not in _DTYPES:
            raise ValueError(
                f"dtype is {self.dtype!r}, must be auto or one of {', '.join(_DTYPES)}"
            )

    @property
    def reuse_mode(self) -> Reuse:
        """What ``reuse`` and ``document_context`` come to."""
        mode = MODES[self.reuse]
        return replace(mode, independent=False) if self.document_context == "full" else mode

    @property
    def context(self) -> DocumentContext:
        """How documents are treated where a request does not say, and no adapter is loaded."""
        return DocumentContext(
            self.document_context in ("auto", "prefix"),
            self.document_gap,
            self.document_repair,
            self.document_temperature,
            select=self.document_select,
        )

    def resolve_dtype(self) -> jnp.dtype:
        """The dtype to load the model in."""
        name = self.dtype
        if name == "auto":
            name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return jnp.dtype(_DTYPES[name])

    def resolve_limits(self, model: LlamaConfig, dtype: jnp.dtype) -> Limits:
        """Batch shapes and pool size for a model whose weights are on the device already.

        Raises:
          ValueError: the pool or the context does not fit; the message gives the sizes.
        """
        cpu = jax.default_backend() == "cpu"
        page_size = self.page_size or _default_page_size()
        page_bytes = page_size * bytes_per_token(model, dtype)
        pool_bytes = self.kv_pool_bytes or _default_pool_bytes()
        num_pages = pool_bytes // page_bytes
        if num_pages < 1:
            raise ValueError(
                f"a KV pool of {pool_bytes:,} bytes does not hold one page of {page_bytes:,} "
                "bytes; raise kv_pool_bytes"
            )
        free = _free_bytes()
        if free is not None and pool_bytes > free:
            raise ValueError(
                f"a KV pool of {pool_bytes / GIB:.2f} GiB does not fit beside the weights: "
                f"{free / GIB:.2f} GiB are free on the device; lower kv_pool_bytes"
            )
        window = model.sliding_window or model.max_position_embeddings
        model_len = self.max_model_len or min(window, model.max_position_embeddings)
        if model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {model_len}, the model is made for at most "
                f"{model.max_position_embeddings} positions"
            )
        if model_len > window:
            raise ValueError(
                f"max_model_len is {model_len}, layers of this model see only the last {window} "
                "tokens (its sliding_window); windows are not computed, so max_model_len can be at "
                f"most {window}, where they make no difference"
            )
        if self.max_model_len is None:
            model_len = min(model_len, num_pages * page_size)
        elif model_len > num_pages * page_size:
            raise ValueError(
                f"max_model_len is {model_len} tokens, a KV pool of {pool_bytes:,} bytes holds "
                f"{num_pages * page_size}; lower max_model_len or raise kv_pool_bytes to at least "
                f"{-(-model_len // page_size) * page_bytes:,}"
            )
        reuse = self.reuse_mode
        stores = reuse.shared and reuse.independent
        return Limits(
            page_size=page_size,
            num_pages=num_pages,
            max_model_len=model_len,
            max_num_seqs=self.max_num_seqs or (16 if cpu else 256),
            max_num_batched_tokens=self.max_num_batched_tokens or (512 if cpu else 4096),
            max_documents=self.max_documents,
            copies_documents=reuse.copied,
            host_pages=self.host_kv_bytes // page_bytes if stores else 0,
            prefill_growth=8 if cpu else 2,
            given_prefill_buckets=tuple(self.prefill_buckets),
            given_decode_buckets=tuple(self.decode_buckets),
        )


def _default_page_size() -> int:
    """On a TPU large enough that starting the copies of a tile takes less than they do."""
    return 64 if jax.default_backend() == "tpu" else 16


def _free_bytes() -> int | None:
    """Free memory of the default device, or none where it does not say (CPUs)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _default_pool_bytes() -> int:
    free = _free_bytes()
    return _CPU_POOL_BYTES if free is None else int(free * POOL_SHARE)
