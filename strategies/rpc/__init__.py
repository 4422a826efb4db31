"""Parts of the strategies over torch.distributed.rpc: agents, queues of remote calls, replicas on workers."""
