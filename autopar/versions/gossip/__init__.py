"""Train without a server, by gossip: each worker averages its weights with its neighbors' (D-PSGD).

In: arrays by key, a mixing matrix, an update function.
Out: the weights of each worker, whose mean takes the steps of SGD on the mean of the gradients.
Imported by: users, through `autopar.GossipStore` and `autopar.GossipClient`.
"""
