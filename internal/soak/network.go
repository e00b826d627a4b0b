package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// A network stands between the clients and the nodes: a proxy for each node. The nodes reach each other directly.
type network struct {
	proxies []*toxiproxy.Proxy
	hosts   map[string]string // the proxy's address by the node's
}

func newNetwork(nodes []string) (*network, error) {
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	n := &network{hosts: map[string]string{}}
	for _, node := range nodes {
		p := toxiproxy.NewProxy(server, node, "127.0.0.1:0", node)
		if err := p.Start(); err != nil {
			n.stop()
			return nil, fmt.Errorf("proxy of %s: %w", node, err)
		}
		n.proxies = append(n.proxies, p)
		n.hosts[node] = p.Listen
	}
	return n, nil
}

func (n *network) stop() {
	for _, p := range n.proxies {
		p.Stop()
	}
}

// cut ends all connections to a node and refuses new ones.
func (n *network) cut(node int) { n.proxies[node].Stop() }

// mend lets clients connect to a node again, at the address it had.
func (n *network) mend(node int) error { return n.proxies[node].Start() }

// A toxic is something that a proxy does to what passes.
type toxic struct {
	Name       string         `json:"name"`
	Type       string         `json:"type"`
	Stream     string         `json:"stream"`
	Toxicity   float32        `json:"toxicity"` // the share of the connections that it befalls
	Attributes map[string]int `json:"attributes"`
}

func (n *network) poison(node int, t toxic) error {
	data, err := json.Marshal(t)
	if err != nil {
		return err
	}
	_, err = n.proxies[node].Toxics.AddToxicJson(strings.NewReader(string(data)))
	return err
}

func (n *network) cure(node int) { n.proxies[node].Toxics.ResetToxics(context.Background()) }

// A detour is how clients come by the proxies, though the members of a replica set know each other, and tell clients of
// each other, by the nodes' own addresses.
type detour struct {
	hosts  map[string]string
	dialer net.Dialer
}

// DialContext is what the driver calls.
func (d *detour) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if host, ok := d.hosts[address]; ok {
		address = host
	}
	return d.dialer.DialContext(ctx, network, address)
}
