"""The cost model of joint plans: units share slots, operations and bandwidth of one device."""
