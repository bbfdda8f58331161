"""Frozen settings: resolved first, then validated when they are constructed, and never changed afterwards."""

from bifolio.config.cache import CacheConfig as CacheConfig
from bifolio.config.cache import KVDtype as KVDtype
from bifolio.config.cache import checked_kv_dtype as checked_kv_dtype
from bifolio.config.engine import MAX_LORA_RANK as MAX_LORA_RANK
from bifolio.config.engine import MAX_LORAS as MAX_LORAS
from bifolio.config.engine import NUMERICS as NUMERICS
from bifolio.config.engine import SPECULATIVE_METHODS as SPECULATIVE_METHODS
from bifolio.config.engine import AdapterConfig as AdapterConfig
from bifolio.config.engine import EngineConfig as EngineConfig
from bifolio.config.engine import NumericDefaults as NumericDefaults
from bifolio.config.engine import SpeculativeConfig as SpeculativeConfig
from bifolio.config.layers import LayerConfig as LayerConfig
from bifolio.config.layers import LayerInputConfig as LayerInputConfig
from bifolio.config.layers import MoeConfig as MoeConfig
from bifolio.config.layers import SharedBlockConfig as SharedBlockConfig
from bifolio.config.layers import StreamConfig as StreamConfig
from bifolio.config.layers import layers_of as layers_of
from bifolio.config.model import MODEL_LIMITS as MODEL_LIMITS
from bifolio.config.model import LatentConfig as LatentConfig
from bifolio.config.model import ModelConfig as ModelConfig
from bifolio.config.model import RopeConfig as RopeConfig
from bifolio.config.pooling import HeadConfig as HeadConfig
from bifolio.config.pooling import PoolingConfig as PoolingConfig
from bifolio.config.recurrent import RecurrentConfig as RecurrentConfig
from bifolio.config.tiers import TierSettings as TierSettings
