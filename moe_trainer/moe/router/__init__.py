from moe_trainer.moe.router.router import TopKRouter

__all__ = ["TopKRouter"]
