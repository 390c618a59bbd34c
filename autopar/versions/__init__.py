"""Versioned weights: parameter servers, with consistency from BSP to asynchronous.

In: arrays by key, a server-side update function, a consistency policy, workers that pull and push.
Out: versions of the weights, each as many updates old as the policy allows.
Imported by: users, through `autopar.VersionedStore`; api.
"""
