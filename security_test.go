package mongoq_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/seed-de459a48/mongoq"
	"github.com/seed-de459a48/mongoq/internal/mongotest"
)

// certificates are those of one authority, in files.
type certificates struct {
	ca, server, client string // the latter two with their keys
	config             *tls.Config
}

// newCertificates makes an authority, and certificates of a server on the loopback address and of a client.
func newCertificates(t testing.TB) certificates {
	t.Helper()
	dir := t.TempDir()
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	rootKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	root, err := x509.CreateCertificate(rand.Reader, authority, authority, rootKey.Public(), rootKey)
	require.NoError(t, err)
	write := func(name string, blocks ...*pem.Block) string {
		var all []byte
		for _, b := range blocks {
			all = append(all, pem.EncodeToMemory(b)...)
		}
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, all, 0o600))
		return path
	}
	issue := func(name string, serial int64) string {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		require.NoError(t, err)
		leaf := &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: authority.NotBefore, NotAfter: authority.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		}
		cert, err := x509.CreateCertificate(rand.Reader, leaf, authority, key.Public(), rootKey)
		require.NoError(t, err)
		pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(t, err)
		return write(name+".pem", &pem.Block{Type: "CERTIFICATE", Bytes: cert}, &pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
	}
	c := certificates{
		ca:     write("ca.pem", &pem.Block{Type: "CERTIFICATE", Bytes: root}),
		server: issue("server", 2), client: issue("client", 3),
	}
	pair, err := tls.LoadX509KeyPair(c.client, c.client)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	parsed, err := x509.ParseCertificate(root)
	require.NoError(t, err)
	pool.AddCert(parsed)
	c.config = &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	return c
}

// fortress is a server that demands TLS with a client's certificate, and a password.
type fortress struct {
	server *mongotest.Server
	certs  certificates
	admin  *mongo.Client
}

func newFortress(t testing.TB) *fortress {
	t.Helper()
	certs := newCertificates(t)
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("c2VjcmV0", 8)), 0o600))
	f := &fortress{certs: certs, server: mongotest.Private(t, mongotest.Options{
		ReplicaSet: 1, Client: options.Client().SetTLSConfig(certs.config),
		Args: []string{"--keyFile", key, "--tlsMode", "requireTLS", "--tlsCertificateKeyFile", certs.server, "--tlsCAFile", certs.ca},
	})}
	// Who comes from the same machine may make the first user.
	nobody := f.connect(t, f.uri(""))
	require.NoError(t, nobody.Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "createUser", Value: "root"}, {Key: "pwd", Value: "root"}, {Key: "roles", Value: bson.A{"root"}},
	}).Err())
	f.admin = f.connect(t, f.uri("root:root@"))
	return f
}

// uri is a connection string with everything in it that the server demands.
func (f *fortress) uri(user string) string {
	return strings.Replace(f.server.URI(), "://", "://"+user, 1) + "&authSource=admin&tls=true&tlsCAFile=" + url.QueryEscape(f.certs.ca) +
		"&tlsCertificateKeyFile=" + url.QueryEscape(f.certs.client)
}

func (f *fortress) connect(t testing.TB, uri string) *mongo.Client {
	t.Helper()
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		require.NoError(t, client.Disconnect(ctx))
	})
	return client
}

// documentedRole is the createRole command of docs/security.md, for a database.
func documentedRole(t testing.TB, db string) bson.D {
	t.Helper()
	page, err := os.ReadFile("docs/security.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(page), "```json\n")
	require.True(t, ok)
	text, _, ok := strings.Cut(rest, "```")
	require.True(t, ok)
	var cmd bson.D
	require.NoError(t, bson.UnmarshalExtJSON([]byte(strings.ReplaceAll(text, `"app"`, `"`+db+`"`)), false, &cmd))
	return cmd
}

// citizen makes a user with the documented role, and gives the database as that user sees it.
func (f *fortress) citizen(t testing.TB, db string) *mongo.Database {
	t.Helper()
	require.NoError(t, f.admin.Database(db).RunCommand(t.Context(), documentedRole(t, db)).Err())
	require.NoError(t, f.admin.Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "createUser", Value: db}, {Key: "pwd", Value: "pw"},
		{Key: "roles", Value: bson.A{bson.D{{Key: "role", Value: "mongoq"}, {Key: "db", Value: db}}}},
	}).Err())
	return f.connect(t, f.uri(db+":pw@")).Database(db)
}

// grant changes the rights of the documented role.
func (f *fortress) grant(t testing.TB, db string, privileges any) {
	t.Helper()
	require.NoError(t, f.admin.Database(db).RunCommand(t.Context(), bson.D{
		{Key: "updateRole", Value: "mongoq"}, {Key: "privileges", Value: privileges},
	}).Err())
}

func privilegesOf(role bson.D) bson.A {
	for _, e := range role {
		if e.Key == "privileges" {
			return e.Value.(bson.A)
		}
	}
	return nil
}

// A user with the documented rights does everything, and nothing is missed.
func TestTheDocumentedRoleIsEnough(t *testing.T) {
	t.Parallel()
	f := newFortress(t)
	db := f.citizen(t, "enough")
	var log logbook
	cfg := mongoq.Config{Logger: slog.New(&log)}
	store, other := openStore(t, db, cfg), openStore(t, f.connect(t, f.uri("enough:pw@")).Database("enough"), cfg)
	q := newQueue(t, store, "q", mongoq.QueueConfig{Retention: time.Hour, PollInterval: time.Minute})
	there := newQueue(t, other, "q", mongoq.QueueConfig{PollInterval: time.Minute})

	// Between processes: who waits is rung for.
	w := beginReserve(t, q)
	require.Eventually(t, func() bool { return mongoq.Hears(store) }, soon, 5*time.Millisecond)
	awaitSleep(t, store, "q", 1)
	push(t, there, "x", mongoq.ID(bson.NewObjectID()), mongoq.TTL(time.Hour))
	r := w.result(t)
	require.NoError(t, r.Extend(t.Context(), time.Hour))
	require.NoError(t, r.Rollback(t.Context(), errFailed, mongoq.After(0)))
	require.NoError(t, reserve(t, q).Release(t.Context()))
	require.NoError(t, reserve(t, q).MoveToQ(t.Context(), "q"))
	require.NoError(t, reserve(t, q).DeadLetter(t.Context(), errFailed))
	n, err := q.DeadLetters().Redrive(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	r = reserve(t, q)
	require.NoError(t, r.Commit(t.Context(), mongoq.Result("done")))
	_, err = q.History().Replay(t.Context(), r.ID)
	require.NoError(t, err)
	_, err = q.History().ReplayMany(t.Context(), "again")
	require.NoError(t, err)
	_, err = q.History().SetRetention(t.Context(), 2*time.Hour)
	require.NoError(t, err)
	page, err := q.History().Page(t.Context())
	require.NoError(t, err)
	require.Len(t, page.Envelopes, 1)
	_, err = q.PushMany(t.Context(), ints(10))
	require.NoError(t, err)
	mongoq.HasMet(store, "q") // it claims by turns
	rs, err := q.ReserveMany(t.Context(), 5)
	require.NoError(t, err)
	require.NoError(t, q.CommitMany(t.Context(), rs))
	require.NoError(t, q.Pause(t.Context()))
	require.NoError(t, q.Resume(t.Context()))
	_, err = q.TryPop(t.Context())
	require.NoError(t, err)
	_, err = q.Peek(t.Context(), 1)
	require.NoError(t, err)
	require.NoError(t, q.Remove(t.Context(), push(t, q, "x", mongoq.Delay(time.Hour))))
	_, err = store.Queues(t.Context())
	require.NoError(t, err)
	_, err = q.Purge(t.Context())
	require.NoError(t, err)
	_, err = q.DeadLetters().Purge(t.Context())
	require.NoError(t, err)

	// What somebody wrote by hand, too large to be claimed, is set aside.
	envelopes := f.admin.Database("enough").Collection("mongoq")
	_, err = envelopes.InsertOne(t.Context(), bson.D{
		{Key: "q", Value: "hand"}, {Key: "when", Value: time.Now().Add(-time.Minute)}, {Key: "prio", Value: 2}, {Key: "payload", Value: make([]byte, 16<<20-100)},
	})
	require.NoError(t, err)
	hand := newQueue(t, store, "hand")
	require.Eventually(t, func() bool { // a busy machine may need more than one attempt for so much, and passes it over meanwhile
		_, err := hand.TryReserve(t.Context())
		return errors.Is(err, mongoq.ErrEmpty) && storedIn(t, f.admin.Database("enough"), "hand.dead") == 1
	}, 2*late, 5*time.Millisecond)

	// A transaction of the caller's, and those of forks and joins.
	session, err := db.Client().StartSession()
	require.NoError(t, err)
	defer session.EndSession(background)
	_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) { return q.Push(ctx, "x") })
	require.NoError(t, err)
	killed, err := db.Client().StartSession() // of a process that was killed in one
	require.NoError(t, err)
	defer killed.EndSession(background)
	require.NoError(t, mongoq.NoteTransaction(t.Context(), store, killed, -time.Second))
	p := joinsPipeline(t, db, time.Minute)
	_, err = p.PushMany(t.Context(), ints(5))
	require.NoError(t, err)
	stop := runPipeline(t, p)
	require.Eventually(t, func() bool {
		left, err := f.admin.Database("enough").Collection("mongoq.transactions").CountDocuments(t.Context(), bson.D{})
		done, errDone := stageQueue(t, p, "end").History().Count(t.Context())
		return err == nil && errDone == nil && left == 0 && done == 5
	}, late, 20*time.Millisecond)
	stop()
	said := slices.DeleteFunc(log.from(slog.LevelWarn), func(line string) bool { return strings.Contains(line, "was set aside") })
	require.Empty(t, said)
}

// Without any one of the documented rights a store tells so when it opens: what it cannot do without is an error that
// names the action and the collection, the rest a warning. So none of them is there for nothing.
func TestARightThatIsMissing(t *testing.T) {
	t.Parallel()
	f := newFortress(t)
	db := f.citizen(t, "less")
	all := privilegesOf(documentedRole(t, "less"))
	warned := []string{"mongoq.signals", "mongoq.turns", "mongoq.transactions"}
	for i, privilege := range all {
		resource, actions := privilege.(bson.D)[0].Value.(bson.D), privilege.(bson.D)[1].Value.(bson.A)
		coll := resource[1].Value.(string)
		for k, action := range actions {
			what := fmt.Sprintf("%s on %s", action, coll)
			f.grant(t, "less", all)
			if action == "createIndex" || action == "convertToCapped" { // which matter once
				require.NoError(t, f.admin.Database("less").Drop(t.Context()))
			} else {
				require.NoError(t, openAndClose(t, db, mongoq.Config{}), what)
			}
			rest := slices.Clone(all)
			if rest[i] = (bson.D{{Key: "resource", Value: resource}, {Key: "actions", Value: slices.Delete(slices.Clone(actions), k, k+1)}}); len(actions) == 1 {
				rest = slices.Delete(rest, i, i+1)
			}
			f.grant(t, "less", rest)
			var log logbook
			err := openAndClose(t, db, mongoq.Config{Logger: slog.New(&log)})
			if slices.ContainsFunc(warned, func(w string) bool { return strings.HasSuffix(what, w) }) {
				require.NoError(t, err, what)
				require.NotEmpty(t, log.from(slog.LevelWarn), what)
				continue
			}
			require.ErrorIs(t, err, mongoq.ErrUnauthorized, what)
			require.ErrorContains(t, err, action.(string))
			require.ErrorContains(t, err, "less."+coll)
			require.Empty(t, log.from(slog.LevelWarn), what)
		}
	}
}

func openAndClose(t testing.TB, db *mongo.Database, cfg mongoq.Config) error {
	t.Helper()
	store, err := mongoq.Open(t.Context(), db, cfg)
	if err == nil {
		require.NoError(t, store.Close(t.Context()))
	}
	return err
}

// Who may only read opens a store to look at it; who has rights by other ways than the documented role has them, too;
// rights that are taken away later are an error of the verb, without the payload.
func TestOtherRights(t *testing.T) {
	t.Parallel()
	f := newFortress(t)
	db := f.citizen(t, "ways")
	store := openStore(t, db)
	q := newQueue(t, store, "q")
	id := push(t, q, secret)
	r := reserve(t, q)
	for _, role := range []string{"readWrite", "root", "readWriteAnyDatabase"} {
		user := bson.D{{Key: "createUser", Value: "the-" + role}, {Key: "pwd", Value: "pw"}, {Key: "roles", Value: bson.A{role}}}
		if role == "readWrite" {
			user[2].Value = bson.A{bson.D{{Key: "role", Value: role}, {Key: "db", Value: "ways"}}}
		}
		require.NoError(t, f.admin.Database("admin").RunCommand(t.Context(), user).Err())
		var log logbook
		require.NoError(t, openAndClose(t, f.connect(t, f.uri("the-"+role+":pw@")).Database("ways"), mongoq.Config{Logger: slog.New(&log)}), role)
		require.Empty(t, log.from(slog.LevelWarn), role)
	}
	require.NoError(t, f.admin.Database("admin").RunCommand(t.Context(), bson.D{
		{Key: "createUser", Value: "watcher"}, {Key: "pwd", Value: "pw"},
		{Key: "roles", Value: bson.A{bson.D{{Key: "role", Value: "read"}, {Key: "db", Value: "ways"}}}},
	}).Err())
	var log logbook
	watcher := openStore(t, f.connect(t, f.uri("watcher:pw@")).Database("ways"), mongoq.Config{Logger: slog.New(&log)})
	require.NotEmpty(t, log.from(slog.LevelWarn))
	e, err := watcher.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, secret, payloadOf[string](t, e))
	_, err = newQueue(t, watcher, "q").Push(t.Context(), secret)
	requireRefused(t, err)

	f.grant(t, "ways", bson.A{})
	_, err = q.Push(t.Context(), secret)
	requireRefused(t, err)
	_, err = q.PushMany(t.Context(), []any{secret, secret})
	requireRefused(t, err)
	_, err = q.Push(t.Context(), secret, mongoq.ID(bson.NewObjectID()))
	requireRefused(t, err)
	requireRefused(t, r.MoveToQ(t.Context(), "elsewhere", mongoq.Payload(secret)))
	requireRefused(t, r.Rollback(t.Context(), errFailed, mongoq.Payload(secret)))
	requireRefused(t, r.Commit(t.Context(), mongoq.Result(secret), mongoq.Retain(time.Hour)))
	_, err = q.TryReserve(t.Context())
	requireRefused(t, err)
}

// requireRefused wants the server's refusal, by its code, and no payload in it. Where the look for what became of a write
// is refused as well, its outcome is unknown.
func requireRefused(t testing.TB, err error) {
	t.Helper()
	var se mongo.ServerError
	require.ErrorAs(t, err, &se)
	require.True(t, se.HasErrorCode(codeUnauthorized), err)
	require.NotContains(t, err.Error(), secret)
}

// A client that does not do what the server demands gets its own driver's error.
func TestAClientThatIsNotLetIn(t *testing.T) {
	t.Parallel()
	f := newFortress(t)
	f.citizen(t, "closed")
	for name, uri := range map[string]string{
		"without TLS":           strings.Replace(f.server.URI(), "://", "://closed:pw@", 1) + "&authSource=admin",
		"with a wrong password": f.uri("closed:wrong@"),
		"with no certificate":   strings.Split(f.uri("closed:pw@"), "&tlsCertificateKeyFile=")[0],
	} {
		client := f.connect(t, uri+"&serverSelectionTimeoutMS=1000")
		_, err := mongoq.Open(t.Context(), client.Database("closed"), mongoq.Config{})
		require.Error(t, err, name)
		require.NotErrorIs(t, err, mongoq.ErrUnauthorized, name)
	}
}
