package server

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq/bench/internal/proc"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// CacheMB is the memory that MongoDB and PostgreSQL get for their caches.
const CacheMB = 1024

type mongod struct {
	server  *mongotest.Server
	client  *mongo.Client
	pid     int
	version string
}

// productive gives a server for tests the settings that a production server has by default.
var productive = []bson.D{
	{{Key: "setParameter", Value: 1}, {Key: "ttlMonitorSleepSecs", Value: 60}},
	{{Key: "setParameter", Value: 1}, {Key: "diagnosticDataCollectionEnabled", Value: true}},
	{{Key: "replSetResizeOplog", Value: 1}, {Key: "size", Value: 990.0}}, // MiB: the least that is a default
}

// StartMongo starts a replica set of one node with the defaults of a production server.
func StartMongo(ctx context.Context, progress func(string)) (_ Server, err error) {
	server, err := mongotest.Start(ctx, mongotest.Options{ReplicaSet: 1, CacheMB: CacheMB, Progress: progress})
	if err != nil {
		return nil, err
	}
	m := &mongod{server: server}
	defer func() {
		if err != nil {
			m.Stop()
		}
	}()
	if m.client, err = mongo.Connect(options.Client().ApplyURI(server.URI())); err != nil {
		return nil, err
	}
	for _, cmd := range productive {
		if err := m.admin(ctx, cmd, nil); err != nil {
			return nil, fmt.Errorf("mongod: %w", err)
		}
	}
	var status struct {
		PID     int64  `bson:"pid"`
		Version string `bson:"version"`
	}
	if err := m.admin(ctx, bson.D{{Key: "serverStatus", Value: 1}}, &status); err != nil {
		return nil, fmt.Errorf("mongod: %w", err)
	}
	m.pid, m.version = int(status.PID), "MongoDB "+status.Version
	return m, nil
}

func (m *mongod) URI() string           { return m.server.URI() }
func (m *mongod) Version() string       { return m.version }
func (m *mongod) CPU() (float64, error) { return proc.TreeCPU(m.pid) }

// Settle writes a checkpoint, so that the one for what was prepared does not come while something is measured.
func (m *mongod) Settle(ctx context.Context) error {
	return m.admin(ctx, bson.D{{Key: "fsync", Value: 1}}, nil)
}

func (m *mongod) Stop() {
	if m.client != nil {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // there is nothing to wait for
		_ = m.client.Disconnect(ctx)
	}
	m.server.Stop()
}

func (m *mongod) admin(ctx context.Context, cmd bson.D, out any) error {
	res := m.client.Database("admin").RunCommand(ctx, cmd)
	if out == nil {
		return res.Err()
	}
	return res.Decode(out)
}
